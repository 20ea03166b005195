"""Patch routing by Triton kernels, for CUDA devices.

Nothing here is imported before a map on a GPU asks for it (`moesaic.ops.triton_backend`), and ``import triton``
happens in this package alone.

A map is rows of pixels, channels together: (B·H·W, C). Expert e of image b takes the patches ``index[b, e]``
(B, E, L); their pixels are M = B·L·p² rows, image by image, patch by patch. Row m of expert e is row (e, m) of every
compact tensor: values (E, M, C), contributions (E, M, ks²·O). Inputs multiply, outputs ask:

    values                    the chosen pixels, gated and normalised on the way
    contributions             values times every tap of the expert's kernel, one product (cuBLAS)
    y[b, q, e]                Σ over taps of the contribution that lands there, each position looking up who that is

``slots`` (B, E, N) is the inverse of ``index``: which of its L places an expert gave to a patch, -1 for none.
``owners`` (B, N, E) lists the places given to a patch, expert by expert, and ``owned`` (B, N) counts them. With these
every element of an output is written once, by one program, in one order: nothing is zeroed before, nothing is atomic,
and the same input gives the same bits.

With a norm in front of an expert, positions that it did not choose are not zero but one vector, the same everywhere.
That vector is one more row of its values, row M, and what is gathered is the difference from it; so the gradients of
weights and norm come out of the products as they stand. What the expert answers to it makes the resting map.

    launch         tile sizes, and what every launch needs
    choice         scores, the best patches, gates; and back
    rows           map → values; gradient of values → gradient of the map
    maps           contributions → map; gradient of the map → gradient of contributions
    resting        what is there of experts that chose nothing, and its gradient
    pointwise      both at once for 1×1 kernels, without values and contributions
    norm           statistics of masked maps, and the gradient through them
    joint          back through norm, gates and router at once, for patches of many pixels
    activation     of stacked perceptrons, with its bias
    perceptron     their products
    chosen         a map and who chose what; the way back through the products to map, gates, router and norm
    experts        all of it as torch operations with gradients
    reached        sums over the positions that chosen patches reach, in place of the map
    lines          the same line by line, for patches of several pixels a side
    pooled         convolution, BatchNorm, ReLU and mean over the map by these, with gradients
    thin           3×3 convolutions of few channels, without routing, as torch operations with gradients
    shortcut       a map plus a 1×1 convolution of one of few channels, likewise
"""

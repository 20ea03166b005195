"""Patch routing, and convolutions with channel gates, by Triton kernels, for CUDA devices.

Nothing here is imported before a map on a GPU needs it (`moesaic.ops.triton_backend`). Only this package and
`moesaic.models.wide_resnet.triton` import triton.

A map is rows of pixels with adjacent channels: (B·H·W, C). Expert e of image b selects the patches ``index[b, e]``
(B, E, L); their pixels are M = B·L·p² rows, image by image, patch by patch. Row m of expert e is row (e, m) of every
compact tensor. A convolution is gather → matmul → scatter:

    values (E, M1, C)               the selected pixels, gated and normalised while they are gathered
    contributions (E, M1, ks²·O)    values · taps: every pixel times every tap of the expert's kernel (cuBLAS)
    y[b, q, e]                      Σ over taps of the contributions that belong there, looked up by each position

``slots`` (B, E, N) is the inverse of ``index``: which of its L slots an expert gave to a patch, -1 for none. ``owners``
(B, N, E) lists the slots given to a patch, expert by expert, and ``owner_count`` (B, N) counts them. With these every
element of an output is written once, by one program, in one order: nothing is zeroed first, nothing is atomic, and the
same input gives the same bits.

Behind a norm, unselected positions are not zero but one vector, the same everywhere: ReLU(shift), the background. It is
one more row of the values, row M (M1 = M + 8 keeps rows aligned), and the background is subtracted from the rows before
it, so that the matmuls give the gradients of weights and norm without a correction. The experts' output for it is the
background map.

    launch                dimensions, tiles and accumulator types that every launch needs
    operands              structures that operators take, and their flat form
    expert_choice         scores, top patches, gates; and their gradients
    gather                map → values; gradient of values → gradient of the map
    scatter               contributions → map; gradient of the map → gradient of contributions
    expert_background     output of experts where they selected nothing, and its gradient
    pointwise_experts     gather, matmul and scatter in one for 1×1 kernels
    norm                  statistics of masked maps, and the gradient through them
    norm_router_backward  backward pass through norm, gates and router at once, for patches of many pixels
    activation            of expert MLPs, with the bias
    mlp                   matmuls of expert MLPs
    patch_backward        backward pass through the matmuls to map, gates, router, norm and weights
    patch_ops             expert choice and convolutions as torch operators with gradients
    mlp_ops               expert MLPs as torch operators with gradients

Channel gates; their files say how tensors are laid out. In training:

    channel_topk_gates    scores → top-k gates of all layers, and the gradient
    gated_norm            BatchNorm, gate and ReLU of a map, and the gradient
    channel_ops           both as torch operators with gradients

In inference (`moesaic.models.deepmoe.frozen_gpu`):

    open_channel_blocks   scores → lists of the open blocks of all layers
    channel_conv          convolution of the open blocks of each image
"""

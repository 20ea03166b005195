"""DeepMoE (Wang et al. 2019): networks in which every image opens the channels it needs."""

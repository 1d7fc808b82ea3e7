"""The Fréchet distance between two sets of features, such as rFVD of originals and reconstructions.

Each set is described by a normal distribution: m is its mean and S its covariance. The distance is
|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) (Unterthiner et al. 2018, arXiv 1812.01717).

Shapes: N samples, D features.
"""

import numpy as np

from jaxtrain.errors import InputError


def distance(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Computes the distance in float64.

    The trace of the square root is the sum of the singular values of R1 R2^T, with S = R^T R. R
    comes from the centered features, so that fewer samples than features need no special care.
    """
    if min(len(one_ND), len(other_ND)) < 2:
        raise InputError(
            f"rFVD needs at least two clips, not {min(len(one_ND), len(other_ND))}: add videos"
        )
    means, roots = [], []
    for features in (one_ND, other_ND):
        x = np.asarray(features, np.float64)
        means.append(x.mean(0))
        roots.append(np.linalg.qr(x - x.mean(0), mode="r") / np.sqrt(len(x) - 1))
    shared = np.linalg.svd(roots[0] @ roots[1].T, compute_uv=False).sum()
    spread = sum(float(np.square(root).sum()) for root in roots)
    return float(np.square(means[0] - means[1]).sum() + spread - 2 * shared)

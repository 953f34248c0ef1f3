import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from phenoica.errors import ScoreError
from phenoica.score.probes import fit_l2
from phenoica.score.small_probes import discriminant, l2_logistic


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
def test_l2_is_the_probe_of_scikit_learn(seed, C):
    rng = np.random.default_rng(seed)
    n, d = 40 + 30 * seed, 1 + 4 * seed
    X = rng.standard_normal((n, d)) * rng.uniform(0.3, 3, d)
    labels = rng.random(n) < 0.3
    labels[:2] = True, False
    X[labels, 0] += seed  # from no signal to separable
    weights, intercept = l2_logistic(X, labels, C)
    other = fit_l2(X, labels, C)
    scale = np.abs(other.weights).max()
    np.testing.assert_allclose(weights, other.weights, atol=1e-6 * scale)
    assert intercept == pytest.approx(other.intercept, abs=1e-5 * max(1, scale))


def test_l2_on_one_class_is_refused():
    with pytest.raises(ScoreError, match="only one class"):
        l2_logistic(np.zeros((3, 2)), np.ones(3, bool), 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_discriminant_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    classes = rng.choice(list("cabd"), 120, p=[0.5, 0.2, 0.2, 0.1])
    X = rng.standard_normal((120, 6)) + (pd_codes(classes)[:, None] * rng.standard_normal(6))
    new = rng.standard_normal((50, 6)) * 2
    lda = LinearDiscriminantAnalysis(solver="lsqr", priors=np.full(4, 0.25), covariance_estimator=Shrunk(0.1))
    expected = lda.fit(X, classes).predict(new)
    assert (discriminant(X, classes, new, 0.1) == expected).all()
    Q = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    assert (discriminant(X @ Q, classes, new @ Q, 0.1) == expected).all()  # no basis is special


def pd_codes(classes):
    return np.unique(classes, return_inverse=True)[1]


class Shrunk:
    """The covariance of one class, shrunk: shrinking each class and averaging is shrinking the average."""

    def __init__(self, shrinkage):
        self.shrinkage = shrinkage

    def fit(self, X):
        covariance = np.cov(X.T, bias=True)
        d = len(covariance)
        self.covariance_ = (1 - self.shrinkage) * covariance
        self.covariance_ += self.shrinkage * np.trace(covariance) / d * np.eye(d)
        return self

import numpy as np
import pandas as pd
import pytest

from phenoica.disentangle.concentration import concentration, participation, sentences, top_share


def tables(batch, biology=None, **more):
    """Component tables: a list of batch omega2 a view; rotation has one list a draw."""
    frames = []
    for view, values in batch.items():
        for draw, omega2 in enumerate(values) if view == "rotation" else [(None, values)]:
            k = len(omega2)
            frames.append(
                pd.DataFrame(
                    {
                        "view": view, "draw": pd.array([draw] * k, dtype="Int64"), "index": range(k),
                        "biology": np.ones(k) if biology is None else biology, "batch_omega2": omega2,
                        "row_omega2": np.eye(k)[0], "column_omega2": np.eye(k)[-1], **more,
                    }
                )
            )  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def test_participation_and_top_share_by_hand():
    assert participation(np.array([0, 3.0, 0])) == 1 and participation(np.ones(7)) == pytest.approx(7)
    assert participation(np.array([1e-200, 1e-200])) == pytest.approx(2)
    assert participation(np.zeros(3)) is None and top_share(np.zeros(3)) is None
    assert top_share(np.array([1.0, 5, 2, 2])) == pytest.approx(0.5)
    assert top_share(np.ones(8)) == pytest.approx(0.25)


def test_the_table_is_tidy_and_leaves_out_views_of_other_fits():
    frame = concentration(tables({"pca": [1, 1, 0, 0], "ica": [1, 0, 0, 0], "rotation": [[1, 1, 1, 1], [1, 1, 1, 0]],
                                  "raw": [1, 1, 1, 1], "tvn": [1, 1, 1, 1]}))  # fmt: skip
    assert list(frame.columns) == ["view", "draw", "quantity", "metric", "value"]
    assert len(frame) == 4 * 3 * 2 and set(frame["view"]) == {"pca", "ica", "rotation"}
    batch = frame[(frame["quantity"] == "batch") & (frame["metric"] == "participation")]
    assert batch["value"].tolist() == pytest.approx([2, 1, 4, 3])
    assert batch["draw"].isna().tolist() == [True, True, False, False]
    position = frame[(frame["quantity"] == "position") & (frame["metric"] == "top_quarter_share")]
    assert (position["value"] == 0.5).all()  # the row in the first component, the column in the last


SHORT = "4.0 of random rotations (mean of 2, 4.0 to 4.0), on the wells of the fit"


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (
            {"pca": [1, 1, 1, 0], "ica": [1, 0, 0, 0], "rotation": [[1] * 4] * 2},
            "Batch is spread over 1.0 of 4 ica components (participation number), 3.0 of pca, "
            f"{SHORT}: ica is more concentrated than pca and all 2 rotations.",
        ),
        (
            {"pca": [1, 0, 0, 0], "ica": [1, 1, 0, 0], "rotation": [[1] * 4] * 2},
            f"{SHORT}: ica is more concentrated than all 2 rotations, but NOT than pca.",
        ),
        (
            {"pca": [1, 1, 1, 1], "ica": [1, 1, 1, 0], "rotation": [[1] * 4, [1, 1, 0, 0], [1] * 4]},
            ": ica is NOT more concentrated than random rotations (1 of 3 are at least as concentrated).",
        ),
        (
            {"pca": [1, 0, 0, 0], "ica": [1, 1, 1, 1], "rotation": [[1] * 4] * 2},
            ": ica is NOT more concentrated than pca or random rotations (2 of 2 are at least as concentrated).",
        ),
        ({"ica": [1, 1, 0, 0]}, "on the wells of the fit: there is no rotation to compare ica with."),
        ({"pca": [1, 1, 0, 0]}, "Batch is spread over 2.0 of 4 pca components (participation number), on the wells"),
        ({"pca": [0, 1], "ica": [0, 0]}, "on the wells of the fit: no ica component carries any."),
        ({"pca": [0, 0], "ica": [0, 0]}, "Batch: no component carries any, so over how many it is spread cannot be"),
    ],
)  # fmt: skip
def test_sentences_carry_the_numbers_and_say_where_ica_does_not_help(batch, sentence):
    said = sentences(tables(batch))
    assert sentence in said[0]
    assert [text.split()[0].rstrip(":") for text in said] == ["Batch", "Position", "Biology"]


def test_varimax_stands_in_the_sentence_where_it_was_fitted():
    said = sentences(tables({"ica": [1] * 4, "pca": [1] * 4, "varimax": [1, 1, 0, 0], "rotation": [[1] * 4]}))
    assert "4.0 of pca, 2.0 of varimax, 4.0 of random rotations" in said[0]


def test_no_view_of_the_fit_no_sentence():
    assert sentences(tables({"raw": [1, 1]})) == [] and concentration(tables({"raw": [1, 1]})).empty

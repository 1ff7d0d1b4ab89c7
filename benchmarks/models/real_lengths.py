"""Lengths of real texts as quantiles, for machines to which the texts do not travel.

64 of each distribution: the i-th is the length below which (i + 0.5) / 64 of the sequences lie. A test compares them
with the stored lengths where those are there.
"""

QUANTILES: dict[str, tuple[int, ...]] = {
    # SQuAD (Rajpurkar et al., 2016): questions with windows of paragraphs, as tokens of BERT's lower-case vocabulary:
    # 1,211 windows, 180 on average.
    "squad_windows_512_stride128": (
        48, 70, 87, 94, 105, 110, 112, 114, 118, 120, 122, 124, 125, 129, 131, 133, 135, 137, 139, 141, 142, 144,
        146, 147, 149, 151, 153, 155, 157, 158, 161, 163, 166, 168, 171, 172, 175, 177, 179, 181, 182, 185, 189, 195,
        199, 202, 208, 213, 217, 221, 227, 234, 239, 246, 250, 255, 259, 264, 266, 272, 292, 315, 362, 512,
    ),
}  # fmt: skip

"""The demo: the main job end to end on real text and real weights, each claim checked against a peer as it is made.

`run.run_demo` goes through the steps, one file each (tokenizing, inference, training, search, checkpoint); a step is a
function that returns a small frozen dataclass, and `terminal` and `report` only render those.
"""

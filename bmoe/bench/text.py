"""What is fed to a model when no text is given: plain English, so that routing varies as it does in use."""

from __future__ import annotations

from typing import Final

DEFAULT_TEXT: Final = """\
The harbour master kept two clocks on the wall of his office, one for the town and one for the sea. The
town's clock was always right, because the baker set it every morning when he came to collect the letters.
The sea's clock was nailed to the wood beside the window, and nobody could say what it measured, since its
hands went round once in twelve hours and twenty-five minutes. Visitors thought that it was broken. Pilots
looked at it before they looked at anything else.

In the spring of the year when the new bridge was built, an engineer arrived from the capital with nine
boxes of instruments and a letter from the ministry. She asked for a table, a lamp and a list of every
ship that had entered the river since the great flood. The harbour master gave her the lamp. The table had
to be carried down from the school, and the list, he explained, did not exist: there had been one, but the
paper was good and the winters were long. "Then we shall measure," said the engineer, and opened the first
box.

She measured the depth of the channel at forty points, at high water and at low water, and she measured
the wind on the roof of the customs house. She asked the ferryman how he knew where the current turned,
and wrote down his answer although it was mostly about fish. After three weeks she had filled eleven
notebooks. What surprised her most was how little of it could be learned from any single number. A depth
meant nothing without the hour, an hour meant nothing without the moon, and the wind could cancel both. So
she drew a table with many columns and few rows, and beside each figure she wrote how often she had seen
it and how far it had strayed.

"Does your table say when the bridge will be finished?" asked the baker. "No," she said, "but it says when
it can be lifted into place without killing anyone: four times next month, for twenty minutes each." The
harbour master looked at the clock beside the window, counted on his fingers, and nodded. He had arrived
at the same four days, by another road, some thirty years earlier.
"""

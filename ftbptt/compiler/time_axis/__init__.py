"""Work without a recurrence, for all steps at once.

``batching`` (one step -> all steps) with the rules that ``convolution`` and ``images`` have, and
``reduction`` (the sum over the steps, as of a weight's gradient).
"""

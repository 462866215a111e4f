"""A step or a loss -> a graph of ATen operations (``trace``).

The others see to what tracing alone does not do: functions that it cannot follow
(``function_overrides``, ``rnn``, ``embedding_bag``, ``custom_gradient``, ``detached_writes``),
operations of which a graph shall not consist (``decompositions``, ``random_ops``,
``linalg_checks``), values that Python needs (``known_values``), tensors that it closes over
(``captures``), what is read once and may change (``constants``), what would happen once instead of
at each step (``effects``, ``random_draws``), and what is wrong with a step (``step_checks``,
``errors``). ``variables`` are what Python can read and rebind, ``attempts`` traces that may fail.
"""

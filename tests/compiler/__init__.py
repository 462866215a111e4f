"""What becomes of a step: the graph, its gradient, its blocks."""

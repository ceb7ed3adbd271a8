"""How good a model is: answers to tasks, the loss of texts, and text that it writes."""

"""What a model costs, what its layers attend to, what it looks at, and how it trained."""

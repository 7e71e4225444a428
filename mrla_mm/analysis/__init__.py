"""What a training did and what a model finds: curves and pictures."""

"""What a trained model remembers: tasks, and the models that they are put to."""

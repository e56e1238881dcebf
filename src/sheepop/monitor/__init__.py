"""What a server's log of conversations says about its model, and the data that it gives for training."""

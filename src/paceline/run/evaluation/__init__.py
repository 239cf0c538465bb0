"""The workers together beside training: evaluation, prediction, and values between them."""

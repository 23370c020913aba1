"""`tandem train`: trains a byte-level GPT several times from the same start, with torch's modules and with Tandem, and compares loss, speed and memory."""

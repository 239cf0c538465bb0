"""What each worker did when: recorded while a run goes on, read and shown at any time."""

"""How micro-batches reach a worker: sharded or coordinated reading, readers, copies to the device."""

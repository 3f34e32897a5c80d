"""One model on one device: runners, ragged caches, masks, recorded passes, streams, memory."""

"""Who proposes draft tokens: the contract, and one file per kind of drafter."""

"""From dataset rows to the tensors of a batch: formats, chat, tokenising, packing, layouts."""

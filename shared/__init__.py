"""What both processes need, and nothing else: the words they exchange, the habits they share.

The gateway and the replica meet only as bytes. Whatever crosses that line is named here once
(`ids`, `messages`), encoded here once (`wire`), and framed here once (`framing`). The rest are
habits that would drift if each half kept its own: reading settings, logging, starting tasks, and
the shape of an OpenAI error.
"""

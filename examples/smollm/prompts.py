"""Prompts for demonstrations, short to long: what is typed by the user, before the chat format is put around it.

The long one is the interesting one: its KV cache takes 15.5 MB (bfloat16), and its prefill one to two seconds on a CPU.
"""

from __future__ import annotations

__all__ = ["LONG", "MEDIUM", "PROMPTS", "SHORT"]

SHORT = "What is the capital of France?"

MEDIUM = """\
A small town library keeps about twenty thousand books. For many years a librarian wrote each loan on a paper card \
and filed the card by the date on which the book was due. Finding out who had a certain book meant going through \
the whole drawer. Last year the library bought a computer. Every book now has a number, every reader has a number, \
and a loan is one line in a table that holds both of them together with the date. The computer finds any book in \
less than a second, and it prints a letter when a book is late. The librarian has time again to read to the \
children on Saturday mornings.

Explain in two sentences how the computer changed the work of the librarian.\
"""

LONG = """\
Read the following text carefully and answer the question at the end.

A large language model answers a request in two phases. In the first phase, called prefill, the model reads the \
whole prompt at once. For every token of the prompt and for every layer of the network it computes a key vector and \
a value vector. These vectors are kept in memory, because every later token has to look at them again. This memory \
is called the KV cache. In the second phase, called decode, the model writes the answer one token at a time. Each \
step adds the key and the value of one more token to the cache and reads all of those that are already there.

The two phases need different things from the hardware. Prefill works on many tokens together, so it is limited by \
how fast the processor can multiply matrices. Decode works on one token at a time, so it is limited by how fast the \
weights and the cache can be read from memory. If both phases share one processor they disturb each other: a long \
prompt that arrives in the middle of an answer makes the reader of that answer wait. For this reason many operators \
put the two phases on different machines. This is called disaggregated serving. Prefill workers only read prompts, \
and decode workers only write answers. Each group can be made as large as the traffic demands.

Disaggregated serving has a price. The KV cache is computed on one machine and needed on another, so it has to be \
moved over the network. A prompt of a few thousand tokens can have a cache of several hundred megabytes. If the \
cache is sent only after the prefill has finished, the user waits for the computation and then waits again for the \
transfer. A better way is to send the cache layer by layer. As soon as the first layer has been computed it can \
leave, while the processor is still busy with the second layer. When the last layer is done, only that one layer \
remains to be sent, and the first word of the answer appears almost at once. In other words, the transfer hides \
behind the computation.

The cache is not one long piece of memory. It is divided into blocks of a few tokens each, much as an operating \
system divides memory into pages. A table says which block holds which part of the prompt. The blocks of one request \
can lie anywhere, and the receiving machine will use other blocks than the sending machine did. The program that \
moves the cache must therefore collect many small blocks on one side and spread them out on the other side without \
losing time on each of them.

Finally, machines fail. A decode worker may stop while the cache is on its way to it. The prefill worker should not \
have to wait for it, and it must not compute the prompt a second time. It chooses another decode worker, sends again \
the layers that it still holds, and goes on with the rest. The user only sees that the answer took a moment longer.

Question: What are the two phases in which a large language model answers a request, and what does each of them do?\
"""

PROMPTS = {"short": SHORT, "medium": MEDIUM, "long": LONG}

mod answers;
mod puppet;
mod refusals;
mod sockets;
mod streams;

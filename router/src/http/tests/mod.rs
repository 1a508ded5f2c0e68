mod answers;
mod fake_serve;
mod refusals;
mod sockets;
mod streams;

mod answers;
mod blocks;
mod fake_serve;
mod refusals;
mod sockets;
mod streams;
mod tokenize;
mod tools;

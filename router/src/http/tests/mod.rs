mod answers;
mod blocks;
pub(crate) mod fake_serve;
mod refusals;
mod sockets;
mod streams;
mod tokenize;
mod tools;

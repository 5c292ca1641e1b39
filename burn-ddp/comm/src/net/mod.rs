//! Sockets, codec and host facts.

pub(crate) mod codec;

//! Ground layer of everything that uses sockets: waiting for them, encoding small messages, addresses and other facts
//! about this host.

pub mod address;
pub mod codec;
pub mod host;
pub(crate) mod poll;

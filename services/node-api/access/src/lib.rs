//! Who may use the node API, and how much of it: TLS, authentication, authorization, and the limits of each
//! client.
//!
//! [`authn`] has the order of credentials, [`authz`] the table of permissions, [`limits`] the limits of each
//! client. Certificates and the kubeconfig are read again when they change ([`reload`]). This crate serves no
//! page and has no listener.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod authn;
pub mod authz;
pub mod cache;
mod digest;
pub mod limits;
pub mod reload;
pub mod review;
pub mod tls;
mod user;
pub mod x509;

pub use user::{AUTHENTICATED, User};

//! Who asks, and whether they may.

pub mod authn;
pub mod authz;
pub mod cache;
pub mod review;
pub mod x509;

use std::collections::BTreeMap;

/// Everybody who showed who they are.
pub const AUTHENTICATED: &str = "system:authenticated";

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct User {
    /// Name.
    pub name: String,
    /// An id that a name used again does not share.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// What else the authenticator says.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// A request without credentials.
    #[must_use]
    pub fn anonymous() -> Self {
        Self {
            name: "system:anonymous".to_owned(),
            groups: vec!["system:unauthenticated".to_owned()],
            ..Self::default()
        }
    }

    /// Adds the group of everybody who showed who they are.
    #[must_use]
    pub fn authenticated(mut self) -> Self {
        if !self.groups.iter().any(|g| g == AUTHENTICATED) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }
}

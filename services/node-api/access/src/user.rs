//! The user of a request.

use std::collections::BTreeMap;

/// The group of all authenticated users.
pub const AUTHENTICATED: &str = "system:authenticated";

/// An authenticated user.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct User {
    /// User name, such as `system:serviceaccount:NAMESPACE:NAME`.
    pub name: String,
    /// Unique ID, unlike the name.
    pub uid: String,
    /// Groups of the user, with [`AUTHENTICATED`].
    pub groups: Vec<String>,
    /// Additional attributes from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// Returns the user of requests without credentials.
    #[must_use]
    pub fn anonymous() -> Self {
        Self {
            name: "system:anonymous".to_owned(),
            groups: vec!["system:unauthenticated".to_owned()],
            ..Self::default()
        }
    }

    /// Adds the group of all authenticated users.
    #[must_use]
    pub fn authenticated(mut self) -> Self {
        if !self.groups.iter().any(|g| g == AUTHENTICATED) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }
}

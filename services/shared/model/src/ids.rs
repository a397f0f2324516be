//! Typed ids of pods, containers and sandboxes. They are parsed where they enter the process.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The error for an invalid id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {problem}")]
pub struct InvalidId {
    /// The kind of id: `pod uid`, `container id` or `sandbox id`.
    pub what: &'static str,
    /// The reason, such as `empty`.
    pub problem: &'static str,
}

fn checked(what: &'static str, value: &str) -> Result<Arc<str>, InvalidId> {
    if value.is_empty() {
        return Err(InvalidId { what, problem: "empty" });
    }
    if value.len() > 256 {
        return Err(InvalidId { what, problem: "longer than 256 bytes" });
    }
    // Ids become file names and cgroup names.
    if value.starts_with('.') || value.bytes().any(|b| b == b'/' || b == 0 || b.is_ascii_control()) {
        return Err(InvalidId { what, problem: "not usable as a file name" });
    }
    Ok(Arc::from(value))
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Validates and wraps an id.
            ///
            /// # Errors
            /// Fails if the id is empty, longer than 256 bytes or not usable as a file name.
            pub fn parse(value: &str) -> Result<Self, InvalidId> {
                checked($what, value).map(Self)
            }

            /// Returns the id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(value: String) -> Result<Self, InvalidId> {
                Self::parse(&value)
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.0.as_ref().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

id!(
    /// `metadata.uid` of a pod. That of a static pod is derived from its manifest.
    PodUid, "pod uid"
);
id!(
    /// Id of a container as the runtime reports it, without the prefix `containerd://`.
    ContainerId, "container id"
);
id!(
    /// Id of a pod sandbox as the runtime reports it.
    SandboxId, "sandbox id"
);

/// UID, namespace and name of a pod.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodRef {
    /// `metadata.uid`.
    pub uid: PodUid,
    /// `metadata.namespace`.
    pub namespace: Arc<str>,
    /// `metadata.name`.
    pub name: Arc<str>,
}

impl PodRef {
    /// Returns `<name>_<namespace>` (`pkg/kubelet/container: GetPodFullName`).
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}_{}", self.name, self.namespace)
    }
}

/// Formats the pod as `<name>_<namespace>(<uid>)` (`pkg/kubelet/util/format: Pod`).
impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}({})", self.name, self.namespace, self.uid)
    }
}

impl fmt::Debug for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_could_leave_its_directory_is_refused() {
        for bad in ["", ".", "..", "a/b", "../x", ".hidden", "a\0b", "a\nb"] {
            assert!(PodUid::parse(bad).is_err(), "{bad:?}");
        }
        assert_eq!(PodUid::parse("5f0c-1").unwrap().as_str(), "5f0c-1");
    }

    #[test]
    fn a_pod_is_formatted_as_in_the_kubelet() {
        let pod =
            PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() };
        assert_eq!(pod.to_string(), "web_default(u1)");
        assert_eq!(pod.full_name(), "web_default");
    }
}

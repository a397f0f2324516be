//! Containers, as far as they give resources to each other.

/// How long a container runs in the life of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// An init container, which ends before the next container starts.
    Init,
    /// An init container with the restart policy `Always`.
    Sidecar,
    /// A regular container.
    Regular,
}

/// The containers of a request, by the scope of the topology manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestScope<'a> {
    /// The container with this name.
    Container(&'a str),
    /// All containers of the pod at once.
    Pod,
}

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

/// Treatment of resources of the pod level by the managers (`PodLevelResourceManagers`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodLevel {
    /// A pod with such resources gets no CPUs and no memory of its own.
    Unmanaged,
    /// The Guaranteed containers of such a pod get CPUs and memory, each on its own.
    Containers,
    /// The pod gets CPUs and memory as a whole. Its Guaranteed containers get parts of them, its other
    /// containers share the rest.
    Pod,
}

/// The containers of a request, by the scope of the topology manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestScope<'a> {
    /// The container with this name.
    Container(&'a str),
    /// All containers of the pod at once.
    Pod,
}

//! Who may call what, and how it is sent: one table, no I/O.
use std::time::Duration;

pub use quintlet_kit::paths::CriSocket as Socket;

/// What a call does to the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Changes nothing.
    Read,
    /// Changes something: fenced on `sync`, joined, and run to its end even if the caller goes away.
    Mutation,
    /// Server streaming without an end: passed on frame by frame, on a connection of its own.
    Stream,
}

/// The queue a call waits in before it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Sandbox run, container create and start, updates. Adaptive.
    Start,
    /// StopContainer.
    Stop,
    /// StopPodSandbox and removals.
    Remove,
    /// Status of one object.
    Inspect,
    /// Lists.
    List,
    /// Pulls, per registry host and in all.
    Pull,
    /// ExecSync from pod-sync: lifecycle hooks.
    ExecHook,
    /// ExecSync by grant.
    ExecProbe,
    /// Exec, Attach and PortForward URLs.
    ExecUser,
    /// Statistics.
    Stats,
    /// CheckpointContainer: all memory of a container goes to a disk.
    Checkpoint,
}

impl Lane {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Start,
        Self::Stop,
        Self::Remove,
        Self::Inspect,
        Self::List,
        Self::Pull,
        Self::ExecHook,
        Self::ExecProbe,
        Self::ExecUser,
        Self::Stats,
        Self::Checkpoint,
    ];

    /// The label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Remove => "remove",
            Self::Inspect => "inspect",
            Self::List => "list",
            Self::Pull => "pull",
            Self::ExecHook => "exec-hook",
            Self::ExecProbe => "exec-probe",
            Self::ExecUser => "exec-user",
            Self::Stats => "stats",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// How long a call keeps its slot.
    #[must_use]
    pub fn hold(self) -> Hold {
        match self {
            Self::Stop => Hold::AtMost(Duration::ZERO),
            Self::ExecHook | Self::ExecProbe => Hold::AtMost(EXEC_HOLD),
            Self::Start
            | Self::Remove
            | Self::Inspect
            | Self::List
            | Self::Pull
            | Self::ExecUser
            | Self::Stats
            | Self::Checkpoint => Hold::UntilDone,
        }
    }
}

/// How long a call keeps its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Until the runtime has answered.
    UntilDone,
    /// Until it has answered or this long after it was sent; zero: until it was sent.
    AtMost(Duration),
}

/// When a call that was sent is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deadline {
    /// `runtimeRequestTimeout` after it was sent.
    Usual,
    /// `runtimeRequestTimeout` and the seconds the request itself names; `zero_is_none` where 0 means no limit.
    WithRequest {
        /// Whether 0 in the request means that it may take forever.
        zero_is_none: bool,
    },
    /// Only when the caller says so.
    CallerOnly,
}

/// The kubelet's default `runtimeRequestTimeout`.
pub const CRI_TIMEOUT: Duration = Duration::from_secs(120);
/// What starting a process in a container costs the runtime is over by then; the rest is waiting.
const EXEC_HOLD: Duration = Duration::from_millis(500);

/// The CRI's runtime service.
pub const RUNTIME: &str = "runtime.v1.RuntimeService";
/// The CRI's image service.
pub const IMAGE: &str = "runtime.v1.ImageService";

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Policy {
    /// Full name of the service.
    pub service: &'static str,
    /// Name of the method.
    pub method: &'static str,
    /// Where it may be called; `admin` always may.
    pub sockets: &'static [Socket],
    /// What it does.
    pub class: Class,
    /// Where it waits.
    pub lane: Lane,
    /// When it is given up.
    pub deadline: Deadline,
    /// Sent once more when the connection broke under it: only what is idempotent.
    pub retry: bool,
}

use Socket::{NodeApi, Read, Sync};

const LOOK: &[Socket] = &[Sync, Read, NodeApi];
const SYNC: &[Socket] = &[Sync];
const NODE: &[Socket] = &[NodeApi];
const NOBODY: &[Socket] = &[];
const USUAL: Deadline = Deadline::Usual;

const fn read(service: &'static str, method: &'static str, lane: Lane) -> Policy {
    Policy { service, method, sockets: LOOK, class: Class::Read, lane, deadline: USUAL, retry: true }
}

const fn change(service: &'static str, method: &'static str, lane: Lane) -> Policy {
    Policy { service, method, sockets: SYNC, class: Class::Mutation, lane, deadline: USUAL, retry: false }
}

const fn url(method: &'static str) -> Policy {
    Policy {
        service: RUNTIME,
        method,
        sockets: NODE,
        class: Class::Read,
        lane: Lane::ExecUser,
        deadline: USUAL,
        retry: false,
    }
}

/// The table: the CRI of Kubernetes 1.36.
pub const TABLE: &[Policy] = &[
    read(RUNTIME, "Version", Lane::Inspect),
    read(RUNTIME, "Status", Lane::Inspect),
    read(RUNTIME, "RuntimeConfig", Lane::Inspect),
    read(RUNTIME, "PodSandboxStatus", Lane::Inspect),
    read(RUNTIME, "ContainerStatus", Lane::Inspect),
    read(RUNTIME, "ListPodSandbox", Lane::List),
    read(RUNTIME, "ListContainers", Lane::List),
    read(RUNTIME, "ContainerStats", Lane::Stats),
    read(RUNTIME, "ListContainerStats", Lane::Stats),
    read(RUNTIME, "PodSandboxStats", Lane::Stats),
    read(RUNTIME, "ListPodSandboxStats", Lane::Stats),
    read(RUNTIME, "ListMetricDescriptors", Lane::Stats),
    read(RUNTIME, "ListPodSandboxMetrics", Lane::Stats),
    // Lists in many messages; this proxy answers them where the runtime has no such streams, too.
    read(RUNTIME, "StreamPodSandboxes", Lane::List),
    read(RUNTIME, "StreamContainers", Lane::List),
    read(RUNTIME, "StreamContainerStats", Lane::Stats),
    read(RUNTIME, "StreamPodSandboxStats", Lane::Stats),
    read(RUNTIME, "StreamPodSandboxMetrics", Lane::Stats),
    // The proxy is the only reader of runtime events; others watch RuntimeEvents.
    Policy {
        service: RUNTIME,
        method: "GetContainerEvents",
        sockets: NOBODY,
        class: Class::Stream,
        lane: Lane::Inspect,
        deadline: Deadline::CallerOnly,
        retry: false,
    },
    change(RUNTIME, "RunPodSandbox", Lane::Start),
    change(RUNTIME, "CreateContainer", Lane::Start),
    change(RUNTIME, "StartContainer", Lane::Start),
    change(RUNTIME, "UpdateContainerResources", Lane::Start),
    change(RUNTIME, "UpdatePodSandboxResources", Lane::Start),
    change(RUNTIME, "UpdateRuntimeConfig", Lane::Start),
    Policy {
        deadline: Deadline::WithRequest { zero_is_none: false },
        ..change(RUNTIME, "StopContainer", Lane::Stop)
    },
    change(RUNTIME, "StopPodSandbox", Lane::Remove),
    change(RUNTIME, "RemovePodSandbox", Lane::Remove),
    change(RUNTIME, "RemoveContainer", Lane::Remove),
    change(RUNTIME, "ReopenContainerLog", Lane::Remove),
    Policy {
        deadline: Deadline::WithRequest { zero_is_none: false },
        ..change(RUNTIME, "CheckpointContainer", Lane::Checkpoint)
    },
    // Hooks have no timeout of their own: the grace period ends them.
    Policy {
        deadline: Deadline::WithRequest { zero_is_none: true },
        ..change(RUNTIME, "ExecSync", Lane::ExecHook)
    },
    url("Exec"),
    url("Attach"),
    url("PortForward"),
    read(IMAGE, "ListImages", Lane::List),
    read(IMAGE, "ImageStatus", Lane::Inspect),
    read(IMAGE, "ImageFsInfo", Lane::Stats),
    read(IMAGE, "StreamImages", Lane::List),
    // A pull takes as long as the registry does; whoever asked for it may say how long that is.
    Policy { deadline: Deadline::CallerOnly, ..change(IMAGE, "PullImage", Lane::Pull) },
    change(IMAGE, "RemoveImage", Lane::Remove),
];

/// ExecSync as the service `ProbeExec` sends it.
pub const PROBE_EXEC: Policy = Policy {
    service: RUNTIME,
    method: "ExecSync",
    sockets: NOBODY,
    class: Class::Read,
    lane: Lane::ExecProbe,
    deadline: Deadline::WithRequest { zero_is_none: false },
    retry: false,
};

/// ExecSync as the node API sends it for `/run`: a user's command, neither a hook nor fenced.
pub const USER_EXEC: Policy = Policy {
    service: RUNTIME,
    method: "ExecSync",
    sockets: NODE,
    class: Class::Read,
    lane: Lane::ExecUser,
    deadline: Deadline::CallerOnly,
    retry: false,
};

/// What this proxy answers itself, and where.
const OWN: &[(&str, &[Socket])] = &[
    ("quintlet.runtime.v1.RuntimeEvents", &[Socket::Admin, Sync, Read]),
    ("quintlet.runtime.v1.ProxyInfo", &[Socket::Admin, Sync, Read, NodeApi]),
    ("quintlet.runtime.v1.ProbeExec", &[Socket::Probe]),
    ("quintlet.runtime.v1.ContainerLogs", &[Socket::Admin, NodeApi]),
    ("quintlet.debug.v1.Debug", &[Socket::Admin, Sync, Read, NodeApi]),
    ("grpc.health.v1.Health", &Socket::ALL),
    ("grpc.reflection.v1.ServerReflection", &Socket::ALL),
    ("grpc.reflection.v1alpha.ServerReflection", &Socket::ALL),
];

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The proxy answers it itself.
    Own,
    /// Sent on by its row.
    Forward(&'static Policy),
    /// Sent on as it is: a service no table here knows, on `admin`.
    Passthrough,
    /// The caller is on the wrong socket.
    WrongSocket,
    /// No such method is known, and this socket takes only known ones.
    NotKnown,
}

/// Splits `/package.Service/Method`.
#[must_use]
pub fn split_path(path: &str) -> Option<(&str, &str)> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    (!service.is_empty() && !method.is_empty() && !method.contains('/')).then_some((service, method))
}

/// Decides on one call by its socket and names.
#[must_use]
pub fn verdict(socket: Socket, service: &str, method: &str) -> Verdict {
    if let Some((_, sockets)) = OWN.iter().find(|(own, _)| *own == service) {
        return if sockets.contains(&socket) { Verdict::Own } else { Verdict::WrongSocket };
    }
    if socket == NodeApi && (service, method) == (USER_EXEC.service, USER_EXEC.method) {
        return Verdict::Forward(&USER_EXEC);
    }
    match TABLE.iter().find(|p| p.service == service && p.method == method) {
        Some(policy) if socket == Socket::Admin || policy.sockets.contains(&socket) => {
            Verdict::Forward(policy)
        }
        Some(_) => Verdict::WrongSocket,
        None if socket == Socket::Admin => Verdict::Passthrough,
        None => Verdict::NotKnown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_method_is_in_the_table_once() {
        for (i, row) in TABLE.iter().enumerate() {
            let same = TABLE.iter().skip(i + 1).any(|r| r.service == row.service && r.method == row.method);
            assert!(!same, "{}/{} twice", row.service, row.method);
        }
    }

    #[test]
    fn only_what_changes_nothing_is_retried_or_offered_to_readers() {
        for row in TABLE {
            assert!(!row.retry || row.class == Class::Read, "{}", row.method);
            if row.class == Class::Mutation {
                assert_eq!(row.sockets, SYNC, "{}", row.method);
            }
            assert!(!row.sockets.contains(&Socket::Probe), "{}", row.method);
        }
    }

    #[test]
    fn paths_that_are_not_service_and_method_are_nothing() {
        assert_eq!(split_path("/a.B/C"), Some(("a.B", "C")));
        for bad in ["", "/", "a/b", "//x", "/a/", "/a/b/c", "*"] {
            assert_eq!(split_path(bad), None, "{bad}");
        }
    }

    #[test]
    fn unknown_methods_pass_on_admin_and_nowhere_else() {
        for socket in Socket::ALL {
            for (service, method) in
                [("containerd.services.content.v1.Content", "Write"), (RUNTIME, "NewThing")]
            {
                let expected = if socket == Socket::Admin { Verdict::Passthrough } else { Verdict::NotKnown };
                assert_eq!(verdict(socket, service, method), expected, "{socket:?} {service}/{method}");
            }
        }
    }

    #[test]
    fn the_node_api_reads_runs_what_users_ask_for_and_changes_nothing_else() {
        for row in TABLE.iter().filter(|row| row.class == Class::Mutation) {
            let expected =
                if row.method == "ExecSync" { Verdict::Forward(&USER_EXEC) } else { Verdict::WrongSocket };
            assert_eq!(verdict(NodeApi, row.service, row.method), expected, "{}", row.method);
        }
        for method in ["Exec", "Attach", "PortForward", "ContainerStatus"] {
            assert!(matches!(verdict(NodeApi, RUNTIME, method), Verdict::Forward(_)), "{method}");
        }
        assert_eq!(verdict(NodeApi, "quintlet.runtime.v1.ContainerLogs", "Read"), Verdict::Own);
        assert_eq!(verdict(Socket::Read, "quintlet.runtime.v1.ContainerLogs", "Read"), Verdict::WrongSocket);
    }

    #[test]
    fn the_probe_socket_takes_probe_execs_only() {
        for row in TABLE {
            assert_eq!(
                verdict(Socket::Probe, row.service, row.method),
                Verdict::WrongSocket,
                "{}",
                row.method
            );
        }
        assert_eq!(verdict(Socket::Probe, "quintlet.runtime.v1.ProbeExec", "Exec"), Verdict::Own);
        assert_eq!(verdict(Socket::Admin, "quintlet.runtime.v1.ProbeExec", "Exec"), Verdict::WrongSocket);
    }
}

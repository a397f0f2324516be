//! The table of the methods that each caller may call, and of how a call is forwarded. Does no I/O.
use std::sync::LazyLock;
use std::time::Duration;

pub use quintlet_kit::args::paths::CriSocket as Socket;

/// The effect of a call on the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Changes nothing.
    Read,
    /// Changes state: fenced on the socket `sync`, joined with identical calls, and completed even if the
    /// caller disconnects.
    Mutation,
    /// An endless server stream: passed through frame by frame on a connection of its own.
    Stream,
}

/// A queue with a concurrency limit, in which a call waits before it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// RunPodSandbox, CreateContainer, StartContainer and updates. The limit is adaptive.
    Start,
    /// StopContainer. A call holds its slot only until it is sent, since it waits out a grace period.
    Stop,
    /// StopPodSandbox and removals.
    Remove,
    /// Status of one object.
    Inspect,
    /// Lists of the services of the node.
    List,
    /// Pulls, limited per registry and in total.
    Pull,
    /// ExecSync of pod-sync: lifecycle hooks.
    ExecHook,
    /// ExecSync of probe-service, by grant.
    ExecProbe,
    /// Exec, Attach and PortForward.
    ExecUser,
    /// ExecSync of node-api: `/run`, whose commands may run for hours.
    RunUser,
    /// Statistics for evictions and for the node.
    Stats,
    /// Statistics that node-api requests, which do not delay those of evictions.
    StatsUser,
    /// Lists that node-api requests, which do not delay relists.
    ListUser,
    /// CheckpointContainer, which writes all memory of a container to disk.
    Checkpoint,
}

impl Lane {
    /// Every lane, in the order of the metrics.
    pub const ALL: [Self; 14] = [
        Self::Start,
        Self::Stop,
        Self::Remove,
        Self::Inspect,
        Self::List,
        Self::Pull,
        Self::ExecHook,
        Self::ExecProbe,
        Self::ExecUser,
        Self::RunUser,
        Self::Stats,
        Self::StatsUser,
        Self::ListUser,
        Self::Checkpoint,
    ];

    /// Returns the label in metrics.
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
            Self::RunUser => "run-user",
            Self::Stats => "stats",
            Self::StatsUser => "stats-user",
            Self::ListUser => "list-user",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// Returns the name of the lane's queue in metrics.
    #[must_use]
    pub fn queue(self) -> &'static str {
        match self {
            Self::Start => "calls-start",
            Self::Stop => "calls-stop",
            Self::Remove => "calls-remove",
            Self::Inspect => "calls-inspect",
            Self::List => "calls-list",
            Self::Pull => "calls-pull",
            Self::ExecHook => "calls-exec-hook",
            Self::ExecProbe => "calls-exec-probe",
            Self::ExecUser => "calls-exec-user",
            Self::RunUser => "calls-run-user",
            Self::Stats => "calls-stats",
            Self::StatsUser => "calls-stats-user",
            Self::ListUser => "calls-list-user",
            Self::Checkpoint => "calls-checkpoint",
        }
    }

    /// Returns how long a call holds its slot.
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
            | Self::RunUser
            | Self::Stats
            | Self::StatsUser
            | Self::ListUser
            | Self::Checkpoint => Hold::UntilDone,
        }
    }

    /// Returns the lane of the calls that node-api sends for its users, so that these do not delay the calls
    /// of other services.
    fn of_users(self) -> Self {
        match self {
            Self::List => Self::ListUser,
            Self::Stats => Self::StatsUser,
            // node-api sends no other calls of the lanes of services.
            lane @ (Self::Start
            | Self::Stop
            | Self::Remove
            | Self::Inspect
            | Self::Pull
            | Self::ExecHook
            | Self::ExecProbe
            | Self::ExecUser
            | Self::RunUser
            | Self::StatsUser
            | Self::ListUser
            | Self::Checkpoint) => lane,
        }
    }
}

/// How long a call holds its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The slot is released when the runtime has replied.
    UntilDone,
    /// The slot is released when the runtime has replied, or after this time. Zero releases it once the call
    /// was sent.
    AtMost(Duration),
}

/// The time limit of a call that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deadline {
    /// `runtimeRequestTimeout`.
    Default,
    /// `runtimeRequestTimeout` plus the seconds in the request.
    DefaultPlusRequest {
        /// Whether 0 in the request means no limit.
        zero_is_unlimited: bool,
    },
    /// Only the limit that the caller sets.
    CallerOnly,
}

/// The kubelet's default of `runtimeRequestTimeout`.
pub const CRI_TIMEOUT: Duration = Duration::from_secs(120);
/// Time within which the runtime starts the process. After it, the call only waits for the process.
const EXEC_HOLD: Duration = Duration::from_millis(500);

/// Full name of the CRI's service for sandboxes and containers.
pub const RUNTIME: &str = "runtime.v1.RuntimeService";
/// Full name of the CRI's service for images.
pub const IMAGE: &str = "runtime.v1.ImageService";

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Full name of the service.
    pub service: &'static str,
    /// Method name without the service.
    pub method: &'static str,
    /// Sockets that allow the method, in addition to `admin`.
    pub sockets: &'static [Socket],
    /// Whether the call changes the runtime, and how its reply is passed on.
    pub class: Class,
    /// The queue in which the call waits.
    pub lane: Lane,
    /// Time limit of the call, if the caller sets none or a longer one.
    pub deadline: Deadline,
    /// Whether the call is sent again after its connection broke. Only for idempotent calls.
    pub retry: bool,
}

use Socket::{NodeApi, Read, Sync};

const READ_SOCKETS: &[Socket] = &[Sync, Read, NodeApi];
const SYNC_ONLY: &[Socket] = &[Sync];
const NODE_API_ONLY: &[Socket] = &[NodeApi];
const NO_SOCKET: &[Socket] = &[];
const DEFAULT: Deadline = Deadline::Default;

const fn read(service: &'static str, method: &'static str, lane: Lane) -> Policy {
    Policy {
        service,
        method,
        sockets: READ_SOCKETS,
        class: Class::Read,
        lane,
        deadline: DEFAULT,
        retry: true,
    }
}

const fn mutation(service: &'static str, method: &'static str, lane: Lane) -> Policy {
    Policy {
        service,
        method,
        sockets: SYNC_ONLY,
        class: Class::Mutation,
        lane,
        deadline: DEFAULT,
        retry: false,
    }
}

const fn streaming_url(method: &'static str) -> Policy {
    Policy {
        service: RUNTIME,
        method,
        sockets: NODE_API_ONLY,
        class: Class::Read,
        lane: Lane::ExecUser,
        deadline: DEFAULT,
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
    // Lists as streams. The proxy implements them if the runtime does not.
    read(RUNTIME, "StreamPodSandboxes", Lane::List),
    read(RUNTIME, "StreamContainers", Lane::List),
    read(RUNTIME, "StreamContainerStats", Lane::Stats),
    read(RUNTIME, "StreamPodSandboxStats", Lane::Stats),
    read(RUNTIME, "StreamPodSandboxMetrics", Lane::Stats),
    // Only the proxy reads runtime events. Other services watch RuntimeEvents.
    Policy {
        service: RUNTIME,
        method: "GetContainerEvents",
        sockets: NO_SOCKET,
        class: Class::Stream,
        lane: Lane::Inspect,
        deadline: Deadline::CallerOnly,
        retry: false,
    },
    mutation(RUNTIME, "RunPodSandbox", Lane::Start),
    mutation(RUNTIME, "CreateContainer", Lane::Start),
    mutation(RUNTIME, "StartContainer", Lane::Start),
    mutation(RUNTIME, "UpdateContainerResources", Lane::Start),
    mutation(RUNTIME, "UpdatePodSandboxResources", Lane::Start),
    mutation(RUNTIME, "UpdateRuntimeConfig", Lane::Start),
    Policy {
        deadline: Deadline::DefaultPlusRequest { zero_is_unlimited: false },
        ..mutation(RUNTIME, "StopContainer", Lane::Stop)
    },
    mutation(RUNTIME, "StopPodSandbox", Lane::Remove),
    mutation(RUNTIME, "RemovePodSandbox", Lane::Remove),
    mutation(RUNTIME, "RemoveContainer", Lane::Remove),
    mutation(RUNTIME, "ReopenContainerLog", Lane::Remove),
    Policy {
        deadline: Deadline::DefaultPlusRequest { zero_is_unlimited: false },
        ..mutation(RUNTIME, "CheckpointContainer", Lane::Checkpoint)
    },
    // Hooks have no time limit of their own; the grace period ends them.
    Policy {
        deadline: Deadline::DefaultPlusRequest { zero_is_unlimited: true },
        ..mutation(RUNTIME, "ExecSync", Lane::ExecHook)
    },
    streaming_url("Exec"),
    streaming_url("Attach"),
    streaming_url("PortForward"),
    read(IMAGE, "ListImages", Lane::List),
    read(IMAGE, "ImageStatus", Lane::Inspect),
    read(IMAGE, "ImageFsInfo", Lane::Stats),
    read(IMAGE, "StreamImages", Lane::List),
    // A pull takes as long as the registry needs, unless the caller sets a limit.
    Policy { deadline: Deadline::CallerOnly, ..mutation(IMAGE, "PullImage", Lane::Pull) },
    mutation(IMAGE, "RemoveImage", Lane::Remove),
];

/// ExecSync of the service `ProbeExec`.
pub const PROBE_EXEC: Policy = Policy {
    service: RUNTIME,
    method: "ExecSync",
    sockets: NO_SOCKET,
    class: Class::Read,
    lane: Lane::ExecProbe,
    deadline: Deadline::DefaultPlusRequest { zero_is_unlimited: false },
    retry: false,
};

/// ExecSync of node-api for `/run`: a command of a user, neither a hook nor fenced.
pub const USER_EXEC: Policy = Policy {
    service: RUNTIME,
    method: "ExecSync",
    sockets: NODE_API_ONLY,
    class: Class::Read,
    lane: Lane::RunUser,
    deadline: Deadline::CallerOnly,
    retry: false,
};

/// The rows for the socket of node-api, which come before those of the table.
static NODE_API_TABLE: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    let reads = TABLE.iter().filter(|row| row.sockets.contains(&NodeApi));
    reads.map(|row| Policy { lane: row.lane.of_users(), ..*row }).chain([USER_EXEC]).collect()
});

/// Services that the proxy implements itself, and their sockets.
const LOCAL_SERVICES: &[(&str, &[Socket])] = &[
    ("quintlet.runtime.v1.RuntimeEvents", &[Socket::Admin, Sync, Read]),
    ("quintlet.runtime.v1.ProxyInfo", &[Socket::Admin, Sync, Read, NodeApi]),
    ("quintlet.runtime.v1.ProbeExec", &[Socket::Probe]),
    ("quintlet.runtime.v1.ContainerLogs", &[Socket::Admin, NodeApi]),
    ("quintlet.debug.v1.Control", &[Socket::Admin]),
    ("quintlet.debug.v1.Debug", &[Socket::Admin, Sync, Read, NodeApi]),
    ("grpc.health.v1.Health", &Socket::ALL),
    ("grpc.reflection.v1.ServerReflection", &Socket::ALL),
    ("grpc.reflection.v1alpha.ServerReflection", &Socket::ALL),
];

/// The decision about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallDecision {
    /// The proxy implements the service itself.
    Local,
    /// Forwarded by this row.
    Forward(&'static Policy),
    /// Passed through unchanged: an unknown service on `admin`.
    Passthrough,
    /// The socket does not allow the method.
    WrongSocket,
    /// The method is unknown, and the socket allows only known ones.
    Unknown,
}

/// Splits a request path `/SERVICE/METHOD`; `None` for any other form.
#[must_use]
pub fn split_path(path: &str) -> Option<(&str, &str)> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    (!service.is_empty() && !method.is_empty() && !method.contains('/')).then_some((service, method))
}

/// Decides on a call by its socket, service and method.
#[must_use]
pub fn decide(socket: Socket, service: &str, method: &str) -> CallDecision {
    if let Some((_, sockets)) = LOCAL_SERVICES.iter().find(|(own, _)| *own == service) {
        return if sockets.contains(&socket) { CallDecision::Local } else { CallDecision::WrongSocket };
    }
    let is_called = |row: &&Policy| row.service == service && row.method == method;
    if socket == NodeApi
        && let Some(policy) = NODE_API_TABLE.iter().find(is_called)
    {
        return CallDecision::Forward(policy);
    }
    match TABLE.iter().find(is_called) {
        Some(policy) if socket == Socket::Admin || policy.sockets.contains(&socket) => {
            CallDecision::Forward(policy)
        }
        Some(_) => CallDecision::WrongSocket,
        None if socket == Socket::Admin => CallDecision::Passthrough,
        None => CallDecision::Unknown,
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
    fn only_reads_are_retried_or_allowed_to_readers() {
        for row in TABLE {
            assert!(!row.retry || row.class == Class::Read, "{}", row.method);
            if row.class == Class::Mutation {
                assert_eq!(row.sockets, SYNC_ONLY, "{}", row.method);
            }
            assert!(!row.sockets.contains(&Socket::Probe), "{}", row.method);
        }
    }

    #[test]
    fn a_path_without_service_and_method_is_refused() {
        assert_eq!(split_path("/a.B/C"), Some(("a.B", "C")));
        for bad in ["", "/", "a/b", "//x", "/a/", "/a/b/c", "*"] {
            assert_eq!(split_path(bad), None, "{bad}");
        }
    }

    #[test]
    fn unknown_methods_are_allowed_on_admin_only() {
        for socket in Socket::ALL {
            for (service, method) in
                [("containerd.services.content.v1.Content", "Write"), (RUNTIME, "NewThing")]
            {
                let expected =
                    if socket == Socket::Admin { CallDecision::Passthrough } else { CallDecision::Unknown };
                assert_eq!(decide(socket, service, method), expected, "{socket:?} {service}/{method}");
            }
        }
    }

    #[test]
    fn the_node_api_may_read_and_exec_but_not_mutate() {
        for row in TABLE.iter().filter(|row| row.class == Class::Mutation) {
            let expected = if row.method == "ExecSync" {
                CallDecision::Forward(&USER_EXEC)
            } else {
                CallDecision::WrongSocket
            };
            assert_eq!(decide(NodeApi, row.service, row.method), expected, "{}", row.method);
        }
        for method in ["Exec", "Attach", "PortForward", "ContainerStatus"] {
            assert!(matches!(decide(NodeApi, RUNTIME, method), CallDecision::Forward(_)), "{method}");
        }
        assert_eq!(decide(NodeApi, "quintlet.runtime.v1.ContainerLogs", "Read"), CallDecision::Local);
        assert_eq!(
            decide(Socket::Read, "quintlet.runtime.v1.ContainerLogs", "Read"),
            CallDecision::WrongSocket
        );
    }

    #[test]
    fn calls_of_users_share_no_lane_with_services_or_with_commands_that_may_run_for_hours() {
        let lane = |socket, service, method| match decide(socket, service, method) {
            CallDecision::Forward(policy) => policy.lane,
            other => panic!("{method}: {other:?}"),
        };
        for (service, method, of_users, of_services) in [
            (IMAGE, "ImageFsInfo", Lane::StatsUser, Lane::Stats),
            (RUNTIME, "ListPodSandboxStats", Lane::StatsUser, Lane::Stats),
            (RUNTIME, "StreamContainerStats", Lane::StatsUser, Lane::Stats),
            (RUNTIME, "ListPodSandbox", Lane::ListUser, Lane::List),
            (RUNTIME, "StreamContainers", Lane::ListUser, Lane::List),
            (RUNTIME, "ExecSync", Lane::RunUser, Lane::ExecHook),
        ] {
            assert_eq!(lane(NodeApi, service, method), of_users, "{method}");
            assert_eq!(lane(Sync, service, method), of_services, "{method}");
        }
        for method in ["Exec", "Attach", "PortForward"] {
            assert_eq!(lane(NodeApi, RUNTIME, method), Lane::ExecUser, "{method}");
        }
        // node-api does not send the calls of the lane of inspections.
        for row in TABLE.iter().filter(|row| row.sockets == READ_SOCKETS && row.lane != Lane::Inspect) {
            assert_ne!(
                lane(NodeApi, row.service, row.method),
                lane(Read, row.service, row.method),
                "{}",
                row.method
            );
        }
    }

    #[test]
    fn the_probe_socket_allows_probe_execs_only() {
        for row in TABLE {
            assert_eq!(
                decide(Socket::Probe, row.service, row.method),
                CallDecision::WrongSocket,
                "{}",
                row.method
            );
        }
        assert_eq!(decide(Socket::Probe, "quintlet.runtime.v1.ProbeExec", "Exec"), CallDecision::Local);
        assert_eq!(decide(Socket::Admin, "quintlet.runtime.v1.ProbeExec", "Exec"), CallDecision::WrongSocket);
    }
}

//! Fields of the CRI's requests with their numbers (CRI v1 of Kubernetes 1.36).

use quintlet_testkit::fake_runtime::Method;

use crate::wire::{Field, Kind};

const fn one(number: u64, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, many: false }
}

const fn many(number: u64, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, many: true }
}

use Kind::{Bool, Int, Map, Message, Number, Text, Word};

const NAMESPACE: Kind = Word(&["POD", "CONTAINER", "NODE", "TARGET"]);
const GROUPS_POLICY: Kind = Word(&["Merge", "Strict"]);

const ID_MAPPING: &[Field] = &[one(1, "host_id", Int), one(2, "container_id", Int), one(3, "length", Int)];

const USER_NAMESPACE: &[Field] =
    &[one(1, "mode", NAMESPACE), many(2, "uids", Message(ID_MAPPING)), many(3, "gids", Message(ID_MAPPING))];

const NAMESPACES: &[Field] = &[
    one(1, "network", NAMESPACE),
    one(2, "pid", NAMESPACE),
    one(3, "ipc", NAMESPACE),
    one(4, "target_id", Text),
    one(5, "userns_options", Message(USER_NAMESPACE)),
];

const SELINUX: &[Field] =
    &[one(1, "user", Text), one(2, "role", Text), one(3, "type", Text), one(4, "level", Text)];

const PROFILE: &[Field] = &[
    one(1, "profile_type", Word(&["RuntimeDefault", "Unconfined", "Localhost"])),
    one(2, "localhost_ref", Text),
];

const RESOURCES: &[Field] = &[
    one(1, "cpu_period", Int),
    one(2, "cpu_quota", Int),
    one(3, "cpu_shares", Int),
    one(4, "memory_limit_in_bytes", Int),
    one(5, "oom_score_adj", Int),
    one(6, "cpuset_cpus", Text),
    one(7, "cpuset_mems", Text),
    many(8, "hugepage_limits", Message(&[one(1, "page_size", Text), one(2, "limit", Int)])),
    one(9, "unified", Map),
    one(10, "memory_swap_limit_in_bytes", Int),
];

const SANDBOX_SECURITY: &[Field] = &[
    one(1, "namespace_options", Message(NAMESPACES)),
    one(2, "selinux_options", Message(SELINUX)),
    one(3, "run_as_user", Number),
    one(4, "readonly_rootfs", Bool),
    many(5, "supplemental_groups", Int),
    one(6, "privileged", Bool),
    one(7, "seccomp_profile_path", Text),
    one(8, "run_as_group", Number),
    one(9, "seccomp", Message(PROFILE)),
    one(10, "apparmor", Message(PROFILE)),
    one(11, "supplemental_groups_policy", GROUPS_POLICY),
];

const SANDBOX_LINUX: &[Field] = &[
    one(1, "cgroup_parent", Text),
    one(2, "security_context", Message(SANDBOX_SECURITY)),
    one(3, "sysctls", Map),
    one(4, "overhead", Message(RESOURCES)),
    one(5, "resources", Message(RESOURCES)),
];

const PORT: &[Field] = &[
    one(1, "protocol", Word(&["TCP", "UDP", "SCTP"])),
    one(2, "container_port", Int),
    one(3, "host_port", Int),
    one(4, "host_ip", Text),
];

const SANDBOX: &[Field] = &[
    one(
        1,
        "metadata",
        Message(&[
            one(1, "name", Text),
            one(2, "uid", Text),
            one(3, "namespace", Text),
            one(4, "attempt", Int),
        ]),
    ),
    one(2, "hostname", Text),
    one(3, "log_directory", Text),
    one(
        4,
        "dns_config",
        Message(&[many(1, "servers", Text), many(2, "searches", Text), many(3, "options", Text)]),
    ),
    many(5, "port_mappings", Message(PORT)),
    one(6, "labels", Map),
    one(7, "annotations", Map),
    one(8, "linux", Message(SANDBOX_LINUX)),
];

const IMAGE: &[Field] = &[
    one(1, "image", Text),
    one(2, "annotations", Map),
    one(18, "user_specified_image", Text),
    one(19, "runtime_handler", Text),
    one(20, "image_ref", Text),
];

const MOUNT: &[Field] = &[
    one(1, "container_path", Text),
    one(2, "host_path", Text),
    one(3, "readonly", Bool),
    one(4, "selinux_relabel", Bool),
    one(5, "propagation", Word(&["PRIVATE", "HOST_TO_CONTAINER", "BIDIRECTIONAL"])),
    many(6, "uidMappings", Message(ID_MAPPING)),
    many(7, "gidMappings", Message(ID_MAPPING)),
    one(8, "recursive_read_only", Bool),
    one(9, "image", Message(IMAGE)),
    one(10, "image_sub_path", Text),
];

const CAPABILITIES: &[Field] = &[
    many(1, "add_capabilities", Text),
    many(2, "drop_capabilities", Text),
    many(3, "add_ambient_capabilities", Text),
];

const SECURITY: &[Field] = &[
    one(1, "capabilities", Message(CAPABILITIES)),
    one(2, "privileged", Bool),
    one(3, "namespace_options", Message(NAMESPACES)),
    one(4, "selinux_options", Message(SELINUX)),
    one(5, "run_as_user", Number),
    one(6, "run_as_username", Text),
    one(7, "readonly_rootfs", Bool),
    many(8, "supplemental_groups", Int),
    one(9, "apparmor_profile", Text),
    one(10, "seccomp_profile_path", Text),
    one(11, "no_new_privs", Bool),
    one(12, "run_as_group", Number),
    many(13, "masked_paths", Text),
    many(14, "readonly_paths", Text),
    one(15, "seccomp", Message(PROFILE)),
    one(16, "apparmor", Message(PROFILE)),
    one(17, "supplemental_groups_policy", GROUPS_POLICY),
];

const CONTAINER: &[Field] = &[
    one(1, "metadata", Message(&[one(1, "name", Text), one(2, "attempt", Int)])),
    one(2, "image", Message(IMAGE)),
    many(3, "command", Text),
    many(4, "args", Text),
    one(5, "working_dir", Text),
    many(6, "envs", Message(&[one(1, "key", Text), one(2, "value", Text)])),
    many(7, "mounts", Message(MOUNT)),
    many(
        8,
        "devices",
        Message(&[one(1, "container_path", Text), one(2, "host_path", Text), one(3, "permissions", Text)]),
    ),
    one(9, "labels", Map),
    one(10, "annotations", Map),
    one(11, "log_path", Text),
    one(12, "stdin", Bool),
    one(13, "stdin_once", Bool),
    one(14, "tty", Bool),
    one(
        15,
        "linux",
        Message(&[one(1, "resources", Message(RESOURCES)), one(2, "security_context", Message(SECURITY))]),
    ),
    many(17, "CDI_devices", Message(&[one(1, "name", Text)])),
    // An enum of signals, in which 0 is the default.
    one(18, "stop_signal", Int),
];

const AUTH: &[Field] = &[
    one(1, "username", Text),
    one(2, "password", Text),
    one(3, "auth", Text),
    one(4, "server_address", Text),
    one(5, "identity_token", Text),
    one(6, "registry_token", Text),
];

/// CreateContainerRequest.
pub(crate) const CREATE_CONTAINER: &[Field] = &[
    one(1, "pod_sandbox_id", Text),
    one(2, "config", Message(CONTAINER)),
    one(3, "sandbox_config", Message(SANDBOX)),
];

const RUN_SANDBOX: &[Field] = &[one(1, "config", Message(SANDBOX)), one(2, "runtime_handler", Text)];

const PULL_IMAGE: &[Field] = &[
    one(1, "image", Message(IMAGE)),
    one(2, "auth", Message(AUTH)),
    one(3, "sandbox_config", Message(SANDBOX)),
];

const START_CONTAINER: &[Field] = &[one(1, "container_id", Text)];

const STOP_CONTAINER: &[Field] = &[one(1, "container_id", Text), one(2, "timeout", Int)];

const EXEC_SYNC: &[Field] = &[one(1, "container_id", Text), many(2, "cmd", Text), one(3, "timeout", Int)];

const UPDATE_RESOURCES: &[Field] =
    &[one(1, "container_id", Text), one(2, "linux", Message(RESOURCES)), one(4, "annotations", Map)];

const STOP_SANDBOX: &[Field] = &[one(1, "pod_sandbox_id", Text)];

/// Returns the fields of a request; `None` for methods that read or remove.
#[must_use]
pub(crate) fn request(method: Method) -> Option<&'static [Field]> {
    Some(match method {
        Method::RunPodSandbox => RUN_SANDBOX,
        Method::CreateContainer => CREATE_CONTAINER,
        Method::PullImage => PULL_IMAGE,
        Method::StartContainer => START_CONTAINER,
        Method::StopContainer => STOP_CONTAINER,
        Method::ExecSync => EXEC_SYNC,
        Method::UpdateContainerResources => UPDATE_RESOURCES,
        Method::StopPodSandbox => STOP_SANDBOX,
        _ => return None,
    })
}

//! Checks the sysctls of a pod against the safe and the allowed ones (`pkg/kubelet/sysctl`).

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;
pub use quintlet_model::sysctl::normal_name as normal_sysctl;

use super::view::NodeView;

// Safe sysctls, each with the first kernel version in which it is namespaced.
const SAFE_SYSCTLS: [(&str, (u32, u32)); 14] = [
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
    ("net.ipv4.tcp_notsent_lowat", (4, 6)),
    ("net.ipv4.tcp_slow_start_after_idle", (4, 15)),
];

pub(super) fn forbidden(pod: &Pod, view: &NodeView<'_>) -> Option<String> {
    let spec = pod::spec(pod);
    let host_ipc = spec.host_ipc.unwrap_or(false);
    for sysctl in spec.security_context.iter().flat_map(|s| s.sysctls.iter().flatten()) {
        let name = normal_sysctl(&sysctl.name);
        let safe = SAFE_SYSCTLS.iter().any(|(n, since)| *n == name && view.kernel >= *since);
        let allowed = view.allowed_sysctls.iter().any(|pattern| {
            let pattern = normal_sysctl(pattern);
            match pattern.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => pattern == name,
            }
        });
        let ipc = name == "kernel.sem"
            || ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|p| name.starts_with(p));
        let net = name.starts_with("net.");
        if !safe && !allowed {
            return Some(format!("{name:?} not allowlisted"));
        }
        if ipc && host_ipc {
            return Some(format!("{name:?} not allowed with host ipc enabled"));
        }
        if net && pod::host_network(pod) {
            return Some(format!("{name:?} not allowed with host net enabled"));
        }
    }
    None
}

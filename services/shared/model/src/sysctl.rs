//! Names of sysctls, and the namespaces that they belong to.

/// The kind of namespace that a sysctl belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SysctlNamespace {
    /// System V IPC and POSIX message queues.
    Ipc,
    /// Interfaces, addresses and protocols.
    Network,
    /// The domain name. A pod in the network of the node also has the name of the node.
    Uts,
    /// Limits of user namespaces.
    User,
}

/// Returns the namespace of a sysctl with dots as separators. Returns `None` if the sysctl belongs to the
/// whole node (`k8s.io/component-helpers/node/util/sysctl: GetNamespace`,
/// `pkg/kubelet/kuberuntime: applyPodSysctls`).
#[must_use]
pub fn namespace_of(name: &str) -> Option<SysctlNamespace> {
    const IPC: [&str; 8] = [
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
    ];
    if IPC.contains(&name) || name.starts_with("fs.mqueue.") {
        return Some(SysctlNamespace::Ipc);
    }
    if name == "kernel.domainname" {
        return Some(SysctlNamespace::Uts);
    }
    if name.starts_with("net.") {
        return Some(SysctlNamespace::Network);
    }
    name.starts_with("user.").then_some(SysctlNamespace::User)
}

/// Returns a sysctl with dots as separators (`k8s.io/component-helpers/node/util/sysctl: NormalizeName`). If
/// the first separator is a slash, dots and slashes are swapped: `net/ipv4/conf/eno2.100/forwarding` is
/// `net.ipv4.conf.eno2/100.forwarding`.
#[must_use]
pub fn normal_name(name: &str) -> String {
    if name.chars().find(|c| matches!(c, '.' | '/')) != Some('/') {
        return name.to_owned();
    }
    let swapped = |c| match c {
        '.' => '/',
        '/' => '.',
        c => c,
    };
    name.chars().map(swapped).collect()
}

/// Returns whether a text has the form of a sysctl, with dots or slashes as separators
/// (`pkg/apis/core/validation: IsValidSysctlName`).
#[must_use]
pub fn is_valid_name(name: &str) -> bool {
    let is_edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_segment = |segment: &str| {
        segment.starts_with(is_edge)
            && segment.ends_with(is_edge)
            && segment.chars().all(|c| is_edge(c) || matches!(c, '-' | '_'))
    };
    name.len() <= 253 && name.split(['.', '/']).all(is_segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sysctl_of_a_pod_has_its_namespace() {
        for (name, want) in [
            ("kernel.shm_rmid_forced", Some(SysctlNamespace::Ipc)),
            ("fs.mqueue.msg_max", Some(SysctlNamespace::Ipc)),
            ("net.core.somaxconn", Some(SysctlNamespace::Network)),
            ("kernel.domainname", Some(SysctlNamespace::Uts)),
            ("user.max_user_namespaces", Some(SysctlNamespace::User)),
            ("kernel.hostname", None),
            ("kernel.shm_next_id", None),
            ("vm.swappiness", None),
            ("network.x", None),
        ] {
            assert_eq!(namespace_of(name), want, "{name}");
        }
    }

    #[test]
    fn names_with_slashes_are_written_with_dots() {
        for (name, want) in [
            ("net.ipv4.conf.eno2/100.mtu", "net.ipv4.conf.eno2/100.mtu"),
            ("net/ipv4/conf/eno2.100/mtu", "net.ipv4.conf.eno2/100.mtu"),
            ("kernel", "kernel"),
        ] {
            assert_eq!(normal_name(name), want);
        }
    }

    #[test]
    fn a_name_consists_of_words_of_lower_case() {
        for name in ["net/ipv4/tcp_rmem", "kernel.sem", "net.ipv4.conf.eno2/100.mtu", "a-b"] {
            assert!(is_valid_name(name), "{name}");
        }
        let long = "a".repeat(254);
        for name in ["", "net.", ".net", "net..core", "Net.core", "net.core_", "net core", "net.*", &long] {
            assert!(!is_valid_name(name), "{name}");
        }
    }
}

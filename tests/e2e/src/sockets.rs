//! Open TCP connections of processes.

use crate::Node;

/// Returns the remote addresses of a process's connections.
fn connections(pid: i32) -> Vec<String> {
    let mut sockets = std::collections::HashSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is there").flatten() {
        // A descriptor may be closed meanwhile.
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let name = target.to_string_lossy();
        if let Some(inode) = name.strip_prefix("socket:[").and_then(|n| n.strip_suffix(']')) {
            sockets.insert(inode.to_owned());
        }
    }
    let table = |t: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{t}"));
    let tables = ["tcp", "tcp6"].map(|t| table(t).expect("the kernel lists TCP connections"));
    let lines = tables.iter().flat_map(|t| t.lines().skip(1));
    lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        // 0A: the state LISTEN.
        .filter(|fields| fields[3] != "0A" && sockets.contains(fields[9]))
        .map(|fields| format!("{} -> {} in state {}", fields[1], fields[2], fields[3]))
        .collect()
}

/// Returns the connections of node-api, except those to the API server.
///
/// # Panics
/// It is not running.
#[must_use]
pub fn of_node_api(node: &Node) -> Vec<String> {
    let url = node.api().url();
    let (_, api) = url.rsplit_once(':').expect("an address has a port");
    let to_api = format!(":{:04X} in", api.parse::<u16>().expect("a port is a number"));
    let pid = node.service("node-api").process().pid.expect("node-api runs");
    connections(pid).into_iter().filter(|c| !c.contains(&to_api)).collect()
}

/// Returns the connections of the runtime.
///
/// # Panics
/// It is not running.
#[must_use]
pub fn of_runtime(node: &Node) -> Vec<String> {
    connections(i32::try_from(node.containerd.pid().expect("containerd runs")).expect("a pid is small"))
}

//! Listening TCP ports and their processes, from procfs.

use std::collections::BTreeMap;
use std::path::Path;

/// A listening TCP port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listener {
    pub(crate) port: u16,
    /// The process; none if it is not visible.
    pub(crate) pid: Option<u32>,
    /// Command line of the process.
    pub(crate) command: String,
}

/// State of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// Returns all listening ports, each once per socket.
pub(crate) fn listeners(proc: &Path) -> Vec<Listener> {
    let tables =
        ["net/tcp", "net/tcp6"].map(|name| std::fs::read_to_string(proc.join(name)).unwrap_or_default());
    let sockets: Vec<(u16, String)> =
        tables.iter().flat_map(|table| table.lines()).filter_map(socket).collect();
    if sockets.is_empty() {
        return Vec::new();
    }
    let owners = owners(proc);
    let listener = |(port, inode): (u16, String)| {
        let pid = owners.get(&inode).copied();
        let command = pid.map(|pid| command(proc, pid)).unwrap_or_default();
        Listener { port, pid, command }
    };
    sockets.into_iter().map(listener).collect()
}

/// Returns the port and the inode of a line of a listening socket (proc_pid_net(5)).
fn socket(line: &str) -> Option<(u16, String)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let port = u16::from_str_radix(fields.get(1)?.rsplit_once(':')?.1, 16).ok()?;
    let inode = fields.get(9)?;
    (*fields.get(3)? == LISTEN).then(|| (port, (*inode).to_owned()))
}

/// Returns the process of each socket, by inode.
fn owners(proc: &Path) -> BTreeMap<String, u32> {
    let mut owners = BTreeMap::new();
    let processes = std::fs::read_dir(proc).into_iter().flatten().filter_map(Result::ok);
    for pid in processes.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok()) {
        let descriptors = std::fs::read_dir(proc.join(pid.to_string()).join("fd"));
        for descriptor in descriptors.into_iter().flatten().filter_map(Result::ok) {
            let Ok(target) = std::fs::read_link(descriptor.path()) else { continue };
            let target = target.to_string_lossy();
            if let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
                owners.insert(inode.to_owned(), pid);
            }
        }
    }
    owners
}

fn command(proc: &Path, pid: u32) -> String {
    let line = std::fs::read(proc.join(pid.to_string()).join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    line.split('\0').next().unwrap_or_default().chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_the_process_that_listens() {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let found: Vec<Listener> =
            listeners(Path::new("/proc")).into_iter().filter(|found| found.port == port).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].pid, Some(std::process::id()));
        drop(socket);
        assert!(!listeners(Path::new("/proc")).iter().any(|found| found.port == port));
    }
}

//! Finds the node agent that uses a root directory: a kubelet, or another Quintlet. Only reads.
//!
//! - A kubelet is a process named `kubelet` whose root directory is the same directory, which
//!   `/proc/PID/root` shows also for a process in another mount namespace. Its socket in the root directory
//!   shows a kubelet whose process is not visible, for example from a container with a PID namespace of its
//!   own.
//! - A Quintlet holds the lock of the root directory, which the kernel releases when the process ends.
//!   `/proc/locks` names a holder of the same PID namespace.
//! - An agent of the same node has the same node name and an API server in common ([`NodeIdentity`]): a
//!   kubelet by its command line, a Quintlet by the text in its lock file.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

mod identity;

pub use crate::identity::NodeIdentity;

/// File in the root directory that pod-sync locks. Its text is a [`NodeIdentity`] while it is locked.
const LOCK_FILE: &str = "quintlet-owner";

/// Socket that a kubelet serves in its root directory (`pkg/kubelet/kubelet.go: ListenAndServePodResources`).
/// Its other sockets are in the same place whatever its root directory is.
const KUBELET_SOCKET: &str = "pod-resources/kubelet.sock";

/// Root directory of a kubelet without `--root-dir`.
const KUBELET_ROOT: &str = "/var/lib/kubelet";

/// Names of binaries of Quintlet. The one of all services also runs under the name `kubelet`, and after an
/// upgrade as `quintlet-next`.
const QUINTLET: [&str; 3] = ["quintlet", "quintlet-next", "pod-sync"];

/// Number of checks for the end of a pod-sync that is exiting: a process that it has just started may hold
/// the lock until it executes its program.
const EXIT_CHECKS: u32 = 40;
/// Interval of these checks: 2 s in all.
const EXIT_PERIOD: Duration = Duration::from_millis(50);

/// Longest command line in a message, in characters.
const COMMAND_MAX: usize = 160;

/// Exit code of a program that does not start since another agent runs (sysexits.h: EX_UNAVAILABLE).
pub const EXIT_OTHER_AGENT: u8 = 69;

/// A running process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentProcess {
    /// Process ID; none if the process is in another PID namespace.
    pub pid: Option<u32>,
    /// Command line, shortened and without control characters.
    pub command: String,
}

impl fmt::Display for AgentProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) if self.command.is_empty() => write!(f, "pid {pid}"),
            Some(pid) => write!(f, "pid {pid} ({})", self.command),
            None => f.write_str("in another container or on the host"),
        }
    }
}

/// A kubelet that runs on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletProcess {
    /// Process ID and command line.
    pub process: AgentProcess,
    /// Arguments of the command line, without the program.
    pub arguments: Vec<String>,
    /// The root directory, as this process reaches it.
    root_dir: PathBuf,
}

impl KubeletProcess {
    /// Returns whether the kubelet's root directory is `root_dir`. A directory that cannot be compared is
    /// another one.
    #[must_use]
    pub fn uses(&self, root_dir: &Path) -> bool {
        let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
        identity(root_dir).is_some_and(|wanted| identity(&self.root_dir) == Some(wanted))
    }
}

/// Another agent uses the root directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OtherAgent {
    /// A kubelet with this root directory.
    #[error(
        "{} is the root directory of a kubelet that runs, {process}: stop it (systemctl stop kubelet), or choose another --root-dir",
        root_dir.display()
    )]
    Kubelet {
        /// The directory.
        root_dir: PathBuf,
        /// The kubelet.
        process: AgentProcess,
    },
    /// A Quintlet that holds the lock of the directory.
    #[error(
        "{} is the root directory of another Quintlet that runs, {process}: stop it, or choose another --root-dir",
        root_dir.display()
    )]
    Quintlet {
        /// The directory.
        root_dir: PathBuf,
        /// The holder of the lock.
        process: AgentProcess,
    },
    /// An agent on this machine with another root directory and the same node name.
    #[error(
        "the node name {name} is that of another agent that runs on this machine, {process}: stop it, or choose another --node-name"
    )]
    NodeName {
        /// Name of both nodes.
        name: String,
        /// Agent that runs already.
        process: AgentProcess,
    },
}

/// The processes of this machine.
#[derive(Debug, Clone)]
pub struct ProcessTable {
    proc: PathBuf,
}

impl Default for ProcessTable {
    fn default() -> Self {
        Self::at(Path::new("/proc"))
    }
}

impl ProcessTable {
    /// Reads the processes in `proc`, a directory as procfs has it.
    #[must_use]
    pub fn at(proc: &Path) -> Self {
        Self { proc: proc.to_owned() }
    }

    /// Returns all kubelets, apart from Quintlet under that name.
    #[must_use]
    pub fn kubelets(&self) -> Vec<KubeletProcess> {
        let names = std::fs::read_dir(&self.proc).into_iter().flatten().filter_map(Result::ok);
        let mut pids: Vec<u32> =
            names.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect();
        pids.sort_unstable();
        pids.into_iter().filter_map(|pid| self.kubelet(pid)).collect()
    }

    /// Returns the agent that uses `root_dir`, a kubelet or another Quintlet. Blocks while a Quintlet may be
    /// exiting, 2 s at most.
    #[must_use]
    pub fn agent_of(&self, root_dir: &Path) -> Option<OtherAgent> {
        let root = || root_dir.to_owned();
        let mut waits = EXIT_CHECKS;
        while let Some(process) = self.quintlet_of(root_dir) {
            if waits == 0 {
                return Some(OtherAgent::Quintlet { root_dir: root(), process });
            }
            waits = waits.saturating_sub(1);
            std::thread::sleep(EXIT_PERIOD);
        }
        self.kubelet_of(root_dir).map(|process| OtherAgent::Kubelet { root_dir: root(), process })
    }

    /// Returns another agent on this machine that serves the same node, whatever its root directory is.
    /// Blocks while a Quintlet may be exiting, 2 s at most.
    #[must_use]
    pub fn agent_of_node(&self, node: &NodeIdentity) -> Option<OtherAgent> {
        let taken = |process| OtherAgent::NodeName { name: node.name().to_owned(), process };
        let mut waits = EXIT_CHECKS;
        while let Some(process) = self.quintlet_of_node(node) {
            if waits == 0 {
                return Some(taken(process));
            }
            waits = waits.saturating_sub(1);
            std::thread::sleep(EXIT_PERIOD);
        }
        let same = |kubelet: &KubeletProcess| {
            self.identity_of(kubelet).is_some_and(|identity| identity.is_same_node(node))
        };
        self.kubelets().into_iter().find(same).map(|kubelet| taken(kubelet.process))
    }

    fn quintlet_of_node(&self, node: &NodeIdentity) -> Option<AgentProcess> {
        let own = std::process::id();
        let locks = self.locks();
        let holder = locks.into_iter().find(|lock| {
            let identity = || NodeIdentity::parse(&self.lock_text(lock)?);
            lock.pid != own && identity().is_some_and(|identity| identity.is_same_node(node))
        })?;
        Some(self.process(Some(holder.pid)))
    }

    /// Returns the text of a locked file that is the lock of a root directory, read through the descriptor of
    /// its holder.
    fn lock_text(&self, lock: &FileLock) -> Option<String> {
        let descriptors = std::fs::read_dir(self.proc.join(lock.pid.to_string()).join("fd")).ok()?;
        descriptors.filter_map(Result::ok).map(|entry| entry.path()).find_map(|path| {
            let target = std::fs::read_link(&path).ok()?;
            let is_lock = target.file_name()? == LOCK_FILE && inode_name(&path).as_ref() == Some(&lock.inode);
            is_lock.then(|| std::fs::read_to_string(&path).ok())?
        })
    }

    /// Returns the node of a kubelet: `--hostname-override`, or the host name if it is the one that this
    /// process has.
    fn identity_of(&self, kubelet: &KubeletProcess) -> Option<NodeIdentity> {
        let process = self.proc.join(kubelet.process.pid?.to_string());
        let host_name = || {
            let namespace = |process: &Path| std::fs::read_link(process.join("ns/uts")).ok();
            let own = namespace(&self.proc.join("self"))?;
            (namespace(&process)? == own)
                .then(|| std::fs::read_to_string(self.proc.join("sys/kernel/hostname")).ok())?
        };
        let name = value(&kubelet.arguments, "--hostname-override").map(str::to_owned).or_else(host_name)?;
        let kubeconfig = value(&kubelet.arguments, "--kubeconfig")?;
        let path = process.join("root").join(kubeconfig.trim_start_matches('/'));
        Some(NodeIdentity::new(&name, &path))
    }

    /// Returns the kubelet that uses `root_dir`.
    #[must_use]
    pub fn kubelet_of(&self, root_dir: &Path) -> Option<AgentProcess> {
        let visible = self.kubelets().into_iter().find(|kubelet| kubelet.uses(root_dir));
        visible.map(|kubelet| kubelet.process).or_else(|| {
            let pid = listener(&root_dir.join(KUBELET_SOCKET))?;
            pid.is_none_or(|pid| !self.is_quintlet(pid)).then(|| self.process(pid))
        })
    }

    /// Returns the pod-sync that holds the lock of `root_dir`.
    #[must_use]
    pub fn quintlet_of(&self, root_dir: &Path) -> Option<AgentProcess> {
        let path = root_dir.join(LOCK_FILE);
        let visible = self.lock_holder(&path);
        // `/proc/locks` lacks the locks of other PID namespaces.
        visible.or_else(|| is_locked(&path).then(|| self.process(None)))
    }

    /// Returns the process of this PID namespace that holds the lock of a file.
    #[must_use]
    pub fn lock_holder(&self, path: &Path) -> Option<AgentProcess> {
        let inode = inode_name(path)?;
        let holder = self.locks().into_iter().find(|lock| lock.inode == inode)?;
        Some(self.process(Some(holder.pid)))
    }

    /// Returns the locks that processes of this PID namespace hold (flock(2)).
    fn locks(&self) -> Vec<FileLock> {
        let text = std::fs::read_to_string(self.proc.join("locks")).unwrap_or_default();
        let lock = |line: &str| {
            // A waiting process has `->` behind the number.
            let fields: Vec<&str> = line.split_whitespace().skip(1).collect();
            match fields[..] {
                ["FLOCK", _, _, pid, inode, ..] => {
                    Some(FileLock { pid: pid.parse().ok()?, inode: inode.to_owned() })
                }
                _ => None,
            }
        };
        text.lines().filter_map(lock).collect()
    }

    fn kubelet(&self, pid: u32) -> Option<KubeletProcess> {
        let words = self.words(pid)?;
        let name = Path::new(words.first()?).file_name()?;
        if name != "kubelet" || self.is_quintlet(pid) {
            return None;
        }
        let (_, arguments) = words.split_first()?;
        let given = value(arguments, "--root-dir").unwrap_or(KUBELET_ROOT);
        let base = self.proc.join(pid.to_string());
        let root_dir = match given.strip_prefix('/') {
            Some(path) => base.join("root").join(path),
            None => base.join("cwd").join(given),
        };
        Some(KubeletProcess { process: self.process(Some(pid)), arguments: arguments.to_vec(), root_dir })
    }

    fn process(&self, pid: Option<u32>) -> AgentProcess {
        let words = pid.and_then(|pid| self.words(pid)).unwrap_or_default();
        let text: String = words.join(" ").chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let command = match text.char_indices().nth(COMMAND_MAX) {
            Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
            None => text,
        };
        AgentProcess { pid, command }
    }

    fn words(&self, pid: u32) -> Option<Vec<String>> {
        let line = std::fs::read(self.proc.join(pid.to_string()).join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line);
        Some(line.split_terminator('\0').map(str::to_owned).collect())
    }

    /// Returns whether a process runs the binary of this one. A copy of the binary of all programs may have
    /// the name `kubelet` itself.
    fn has_own_binary(&self, pid: u32) -> bool {
        let file = |process: &str| {
            let metadata = std::fs::metadata(self.proc.join(process).join("exe")).ok()?;
            Some((metadata.dev(), metadata.ino()))
        };
        let own = file("self");
        own.is_some() && file(&pid.to_string()) == own
    }

    /// Returns whether a process runs the binary of all services. The binary of an unreadable process is
    /// unknown.
    fn is_quintlet(&self, pid: u32) -> bool {
        if self.has_own_binary(pid) {
            return true;
        }
        let binary = std::fs::read_link(self.proc.join(pid.to_string()).join("exe"));
        // An upgrade replaces the binary of a running process.
        binary.is_ok_and(|path| {
            path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                QUINTLET.contains(&name.strip_suffix(" (deleted)").unwrap_or(&name))
            })
        })
    }
}

/// A lock in `/proc/locks`.
#[derive(Debug)]
struct FileLock {
    pid: u32,
    /// Device and inode of the file, as in [`inode_name`].
    inode: String,
}

/// Returns device and inode of a file as `/proc/locks` has them.
fn inode_name(path: &Path) -> Option<String> {
    let file = std::fs::metadata(path).ok()?;
    let (major, minor) = (nix::sys::stat::major(file.dev()), nix::sys::stat::minor(file.dev()));
    Some(format!("{major:02x}:{minor:02x}:{}", file.ino()))
}

/// Returns the last value of a flag, `--name=value` or `--name value`.
#[must_use]
pub fn value<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    let mut found = None;
    for (index, word) in arguments.iter().enumerate() {
        if word == name {
            found = arguments.get(index.saturating_add(1)).map(String::as_str);
        } else if let Some(value) = word.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')) {
            found = Some(value);
        }
    }
    found
}

/// Returns whether a file is locked. An unlocked file is locked for a moment, as a shared lock.
fn is_locked(path: &Path) -> bool {
    let Ok(file) = std::fs::File::open(path) else { return false };
    // Dropping a lock that was taken releases it.
    matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
}

/// Returns the ID of the process that listens on a socket; none without one in this PID namespace.
#[must_use]
pub fn socket_owner(socket: &Path) -> Option<u32> {
    listener(socket).flatten()
}

/// Returns the process that listens on a socket: `Some(None)` if it is in another PID namespace, none if no
/// process listens.
fn listener(socket: &Path) -> Option<Option<u32>> {
    let stream = UnixStream::connect(socket).ok()?;
    let peer = getsockopt(&stream, PeerCredentials).ok()?;
    Some(u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0))
}

#[cfg(test)]
mod tests;

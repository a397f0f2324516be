//! Traces of an instance on this machine, and their removal without calls of containerd: for instances whose
//! owner was killed, and as the last step of every shutdown.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::mount::MntFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::tree;

use crate::cni::{Names, NatRules, unused_shared_chains};
use crate::host;

/// libcni keeps a result per attachment here; containerd gives no way to move it.
const CNI_RESULTS: &str = "/var/lib/cni/results";

/// Interval between checks for a removal in progress.
const STEP: Duration = Duration::from_millis(10);

/// Number of checks, for 5 s.
const STEPS: usize = 500;

/// The data by which an instance's traces are found.
#[derive(Debug, Clone)]
pub struct Traces {
    /// Directory of the instance.
    pub dir: PathBuf,
    /// gRPC socket of the instance, which is in the command line of its shims.
    pub socket: PathBuf,
    /// Further directories that only this instance uses.
    pub owned: Vec<PathBuf>,
    /// Names of bridge, network and cgroup root.
    pub names: Names,
}

/// Removes the directory of CNI results if it is empty. Another instance may be about to write into it, so
/// only the last one calls this.
pub(crate) fn remove_directory_of_cni_results() {
    let _ = std::fs::remove_dir(CNI_RESULTS);
}

impl Traces {
    /// Removes everything, processes first. Blocks for up to some seconds if something cannot be removed at
    /// once.
    pub fn remove(&self) {
        self.remove_volatile();
        self.remove_cni_results();
        self.remove_dirs();
    }

    /// Removes everything that a reboot removes: processes, mounts, interfaces, iptables rules, cgroups, and
    /// files in memory. Files on disk stay, with the addresses that CNI plugins have assigned. Blocks like
    /// [`Traces::remove`].
    pub fn remove_volatile(&self) {
        // Killed shims leave their sockets behind, whose paths are in the state directory.
        let shim_sockets = self.shim_sockets();
        self.kill_processes();
        self.unmount();
        self.remove_links();
        self.remove_cgroups();
        for socket in shim_sockets {
            let _ = std::fs::remove_file(socket);
        }
        // It contains runc's state and the names of network namespaces, too.
        let _ = tree::remove(&self.dir.join("state"));
    }

    /// Returns the remaining traces, one line each.
    pub fn leftovers(&self) -> Vec<String> {
        let processes = self.processes().into_iter().map(|(pid, what)| format!("process {pid} {what}"));
        let mounts = self.mounts().into_iter().map(|m| format!("mount {}", m.display()));
        let bridge = self.names.bridge();
        let link = Path::new("/sys/class/net").join(&bridge).exists().then(|| format!("interface {bridge}"));
        let rules = NatRules::find(&saved_nat_rules(), self.names);
        let rules = rules
            .rules
            .into_iter()
            .map(|r| format!("iptables rule {r}"))
            .chain(rules.chains.into_iter().map(|c| format!("iptables chain {c}")));
        let cgroups = self.cgroup_trees().into_iter().map(|c| format!("cgroup {}", c.display()));
        let results = self.cni_results().into_iter().map(|f| format!("CNI result {}", f.display()));
        let dirs = self
            .dirs()
            .filter(|d| d.exists())
            .map(|d| format!("directory {}", d.display()))
            .collect::<Vec<_>>();
        processes.chain(mounts).chain(link).chain(rules).chain(cgroups).chain(results).chain(dirs).collect()
    }

    /// Kills containerd itself. Its shims, and thus all pods, keep running.
    pub(crate) fn kill_containerd(&self) {
        for _ in 0..STEPS {
            let found: Vec<i32> =
                all_processes().into_iter().filter(|p| p.is_containerd_of(self)).map(|p| p.pid).collect();
            if found.is_empty() {
                return;
            }
            for pid in found {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(STEP);
        }
    }

    fn dirs(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.dir).chain(&self.owned)
    }

    /// Returns containerd, its shims, and the processes in the instance's cgroups.
    fn processes(&self) -> Vec<(i32, String)> {
        let in_cgroups: BTreeSet<i32> =
            self.cgroup_trees().iter().flat_map(|tree| pids_below(tree)).collect();
        all_processes()
            .into_iter()
            .filter(|p| p.is_of(self) || in_cgroups.contains(&p.pid))
            .map(|p| (p.pid, p.args.join(" ")))
            .collect()
    }

    fn kill_processes(&self) {
        for _ in 0..STEPS {
            let all = all_processes();
            let children: HashMap<i32, Vec<i32>> = all.iter().fold(HashMap::new(), |mut map, p| {
                map.entry(p.parent).or_default().push(p.pid);
                map
            });
            let ours: Vec<i32> = all.iter().filter(|p| p.is_of(self)).map(|p| p.pid).collect();
            // containerd is killed first, since it would clean up after its shims; containers before their
            // shim.
            let containers = ours.iter().flat_map(|pid| children.get(pid).into_iter().flatten().copied());
            let in_cgroups = self.cgroup_trees();
            let in_cgroups = in_cgroups.iter().flat_map(|tree| pids_below(tree));
            let targets: BTreeSet<i32> = ours.iter().copied().chain(containers).chain(in_cgroups).collect();
            // A service of the same owner could have moved this process into its cgroup.
            let own = std::process::id().cast_signed();
            let targets: Vec<i32> = targets.into_iter().filter(|pid| *pid > 1 && *pid != own).collect();
            if targets.is_empty() {
                return;
            }
            for pid in targets {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(STEP);
        }
    }

    fn shim_sockets(&self) -> Vec<PathBuf> {
        let tasks = self.dir.join("state/io.containerd.runtime.v2.task/k8s.io");
        let Ok(entries) = std::fs::read_dir(tasks) else { return Vec::new() };
        entries
            .filter_map(Result::ok)
            .filter_map(|e| std::fs::read_to_string(e.path().join("address")).ok())
            .filter_map(|address| Some(PathBuf::from(address.trim().strip_prefix("unix://")?)))
            .collect()
    }

    fn mounts(&self) -> Vec<PathBuf> {
        host::mounts()
            .into_iter()
            .map(|m| m.point)
            .filter(|point| self.dirs().any(|dir| point.starts_with(dir)))
            .collect()
    }

    fn unmount(&self) {
        // Newest mounts first: an older one becomes visible only after a newer one on the same path.
        for _ in 0..STEPS {
            let mounts = self.mounts();
            if mounts.is_empty() {
                return;
            }
            let mut progress = false;
            for point in mounts.iter().rev() {
                progress |=
                    nix::mount::umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_ok();
            }
            if !progress {
                return;
            }
        }
    }

    fn remove_cni_results(&self) {
        for result in self.cni_results() {
            let _ = std::fs::remove_file(result);
        }
    }

    fn remove_links(&self) {
        let saved = saved_nat_rules();
        let rules = NatRules::find(&saved, self.names);
        if !rules.is_empty() {
            restore_nat_rules(&rules.removal());
        }
        if saved.contains(":CNI-HOSTPORT-")
            && let Some(script) = unused_shared_chains(&saved_nat_rules())
        {
            restore_nat_rules(&script);
        }
        if Path::new("/sys/class/net").join(self.names.bridge()).exists() {
            run(Command::new("ip").args(["link", "delete", &self.names.bridge()]));
        }
    }

    fn cni_results(&self) -> Vec<PathBuf> {
        // The loopback network of CRI does not have the instance's name, but its results end with the
        // sandbox ID.
        let names: Vec<String> = std::fs::read_dir(CNI_RESULTS)
            .map(|entries| {
                entries.filter_map(Result::ok).filter_map(|e| e.file_name().into_string().ok()).collect()
            })
            .unwrap_or_default();
        let prefix = format!("{}-", self.names.network());
        let sandboxes: Vec<&str> =
            names.iter().filter_map(|n| n.strip_prefix(&prefix)?.strip_suffix("-eth0")).collect();
        names
            .iter()
            .filter(|n| {
                n.starts_with(&prefix) || sandboxes.iter().any(|s| **n == format!("cni-loopback-{s}-lo"))
            })
            .map(|n| Path::new(CNI_RESULTS).join(n))
            .collect()
    }

    /// Returns the instance's cgroup root in each hierarchy that has it.
    fn cgroup_trees(&self) -> Vec<PathBuf> {
        let root = self.names.cgroup_root();
        host::mounts()
            .into_iter()
            .filter(|m| m.fs == "cgroup" || m.fs == "cgroup2")
            .map(|m| m.point.join(root.trim_start_matches('/')))
            .filter(|p| p.is_dir())
            .collect()
    }

    fn remove_cgroups(&self) {
        for _ in 0..STEPS {
            let trees = self.cgroup_trees();
            if trees.is_empty() {
                return;
            }
            for tree in trees {
                for dir in subdirs(&tree).iter().rev() {
                    let _ = std::fs::remove_dir(dir);
                }
            }
            if self.cgroup_trees().is_empty() {
                return;
            }
            // The cgroup of a killed process becomes empty a moment later.
            std::thread::sleep(STEP);
        }
    }

    fn remove_dirs(&self) {
        for dir in self.dirs() {
            // A remaining mount may contain data of others.
            if host::mounts().iter().any(|m| m.point.starts_with(dir)) {
                continue;
            }
            // Containers may have written to the directory.
            if let Err(error) = tree::remove(dir) {
                tracing::warn!(dir = %dir.display(), %error, "remove directory failed");
            }
        }
    }
}

struct Process {
    pid: i32,
    parent: i32,
    args: Vec<String>,
}

impl Process {
    fn is_of(&self, traces: &Traces) -> bool {
        self.is_containerd_of(traces) || self.has_flag("-address", &traces.socket)
    }

    fn is_containerd_of(&self, traces: &Traces) -> bool {
        self.has_flag("--config", &traces.dir.join("config.toml"))
    }

    fn has_flag(&self, flag: &str, value: &Path) -> bool {
        self.args.windows(2).any(|pair| pair[0] == flag && Path::new(&pair[1]) == value)
    }
}

/// Returns all processes except zombies.
fn all_processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // The name is in parentheses and may contain any character, including parentheses.
            let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
            let state = fields.next()?;
            let parent = fields.next()?.parse().ok()?;
            if state == "Z" || state == "X" {
                return None;
            }
            let cmdline = std::fs::read(entry.path().join("cmdline")).ok()?;
            let args = cmdline
                .split(|b| *b == 0)
                .filter(|a| !a.is_empty())
                .map(|a| String::from_utf8_lossy(a).into_owned())
                .collect();
            Some(Process { pid, parent, args })
        })
        .collect()
}

/// Returns a directory and its descendants, parents first.
fn subdirs(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![dir.to_path_buf()];
    let mut next = 0;
    while next < found.len() {
        if let Ok(entries) = std::fs::read_dir(&found[next]) {
            found.extend(
                entries
                    .filter_map(Result::ok)
                    .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
                    .map(|e| e.path()),
            );
        }
        next += 1;
    }
    found
}

fn pids_below(tree: &Path) -> Vec<i32> {
    subdirs(tree)
        .iter()
        .filter_map(|dir| std::fs::read_to_string(dir.join("cgroup.procs")).ok())
        .flat_map(|text| text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<i32>>())
        .collect()
}

fn saved_nat_rules() -> String {
    Command::new("iptables-save")
        .args(["-t", "nat"])
        .env("PATH", host::path_with(&[]))
        .stderr(Stdio::null())
        .output()
        .map(|o| String::from_utf8_lossy(&o.stdout).into_owned())
        .unwrap_or_default()
}

fn restore_nat_rules(script: &str) {
    let child = Command::new("iptables-restore")
        .args(["--noflush", "--wait"])
        .env("PATH", host::path_with(&[]))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let output = child.and_then(|mut child| {
        let stdin = child.stdin.take();
        // Both are read at the same time. A full pipe of errors would stop the reader of the rules.
        std::thread::scope(|scope| {
            scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(script.as_bytes())));
            child.wait_with_output()
        })
    });
    match output {
        Ok(o) if o.status.success() => {}
        Ok(o) => {
            tracing::warn!(error = %String::from_utf8_lossy(&o.stderr).trim(), "iptables rules not removed")
        }
        Err(e) => tracing::warn!(error = %e, "iptables-restore did not start"),
    }
}

fn run(command: &mut Command) {
    match command.env("PATH", host::path_with(&[])).stdin(Stdio::null()).output() {
        Ok(o) if o.status.success() => {}
        Ok(o) => {
            tracing::warn!(?command, error = %String::from_utf8_lossy(&o.stderr).trim(), "command failed")
        }
        Err(e) => tracing::warn!(?command, error = %e, "command did not start"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_in_which_a_container_nested_20_000_others_is_removed() {
        // In memory, since a disk takes a minute for this many directories.
        let temp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let dir = temp.path().join("instance");
        std::fs::create_dir(&dir).unwrap();
        let mut at = tree::open_root(&dir).unwrap();
        for _ in 0..20_000 {
            nix::sys::stat::mkdirat(&at, "deep", nix::sys::stat::Mode::S_IRWXU).unwrap();
            at = tree::open_within(std::os::fd::AsFd::as_fd(&at), c"deep").unwrap();
        }
        drop(at);
        let socket = temp.path().join("socket");
        let traces = Traces { dir: dir.clone(), socket, owned: Vec::new(), names: Names::new(255) };
        // A recursion would not fit into this stack.
        std::thread::scope(|s| {
            let thread = std::thread::Builder::new().name("small stack".to_owned()).stack_size(256 << 10);
            thread.spawn_scoped(s, || traces.remove_dirs()).unwrap().join().unwrap();
        });
        assert!(!dir.exists(), "the directory is still there");
    }
}

//! A private containerd.

use std::fs::OpenOptions;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::task::blocking;
use tokio::process::{Child, Command};
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::cleanup::Traces;
use crate::cni::{self, Families, Names};
use crate::config::{self, ContainerdSettings};
use crate::index::{self, Index};
use crate::record::Record;
use crate::{Error, cri, forwarding, host, images};

/// Longest path of a unix socket, without the terminating zero.
const SOCKET_PATH_MAX: usize = 107;

/// Interval between attempts to reach a starting containerd.
const READY_STEP: Duration = Duration::from_millis(20);

/// Limit of the removal of all pods through CRI. Remaining pods are killed.
const GRACEFUL: Duration = Duration::from_secs(15);

/// Time between SIGTERM and SIGKILL of containerd.
const TERM_GRACE: Duration = Duration::from_secs(3);

/// Marker file in directories that were created for an instance and may be deleted.
const MARKER: &str = ".quintlet-localnode";

/// Directory of CDI files, in that of the instance.
const CDI: &str = "cdi";

/// Environment variable with the containerd binary, to run all tests with another version.
pub const CONTAINERD_ENV: &str = "QUINTLET_CONTAINERD";

/// Environment variable with the OCI runtime that runs containers in place of runc, such as crun.
pub const OCI_RUNTIME_ENV: &str = "QUINTLET_OCI_RUNTIME";

/// Options of a private containerd.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directory of the instance, which is created if necessary.
    pub dir: PathBuf,
    /// Further directories of the instance, such as a node's root directory, logs and sockets. One that
    /// existed before and was not empty is never deleted.
    pub owned: Vec<PathBuf>,
    /// The containerd binary; its directory also has the shim. Default: the value of [`CONTAINERD_ENV`], or
    /// else found in `PATH`.
    pub containerd: Option<PathBuf>,
    /// The runc binary, or that of another OCI runtime. Default: the value of [`OCI_RUNTIME_ENV`], or else
    /// found in `PATH`.
    pub runc: Option<PathBuf>,
    /// Directory of the CNI plugins. Default: the directories of distributions.
    pub cni_bin_dir: Option<PathBuf>,
    /// Directory of the lock files of indices, which all instances of a machine share.
    pub lock_dir: PathBuf,
    /// Address families of pods. IPv6 enables `net.ipv6.conf.all.forwarding`, which stays enabled in the
    /// network namespace.
    pub families: Families,
    /// Gives pods access to other networks, if iptables works.
    pub masquerade: bool,
    /// Whether pods outlive the owner: [`Containerd::stop`] and a killed owner leave them running, and the
    /// next start in the same directory adopts them.
    pub keep_pods: bool,
    /// containerd's log. Default: `containerd.log` in the directory, which is removed with it.
    pub log_file: Option<PathBuf>,
    /// Limit of the wait for the CRI.
    pub start_timeout: Duration,
}

impl Options {
    /// Returns the defaults for a directory.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            owned: Vec::new(),
            containerd: std::env::var_os(CONTAINERD_ENV).map(PathBuf::from),
            runc: std::env::var_os(OCI_RUNTIME_ENV).map(PathBuf::from),
            cni_bin_dir: None,
            lock_dir: PathBuf::from(index::DEFAULT_LOCK_DIR),
            families: Families::default(),
            masquerade: false,
            keep_pods: false,
            log_file: None,
            start_timeout: Duration::from_secs(30),
        }
    }
}

/// A running private containerd.
///
/// Dropping it removes everything without calls of containerd, so that a failed test leaves nothing, unless
/// [`Options::keep_pods`] is set. Use [`Containerd::down`] for an ordinary shutdown.
#[derive(Debug)]
pub struct Containerd {
    traces: Traces,
    binary: PathBuf,
    path: std::ffi::OsString,
    log_file: PathBuf,
    start_timeout: Duration,
    keep_pods: bool,
    index: Option<Index>,
    child: Option<Child>,
}

impl Containerd {
    /// Starts containerd and waits until its CRI responds.
    ///
    /// First removes the traces of dead instances, including one in the same directory, unless that one is to
    /// be kept: its pods are then adopted.
    ///
    /// # Errors
    /// Fails if a program is missing, a directory cannot be written, or containerd does not respond in time.
    pub async fn start(options: Options) -> Result<Self, Error> {
        let containerd = options.containerd.clone().map_or_else(|| host::find_program("containerd"), Ok)?;
        let runc = options.runc.clone().map_or_else(|| host::find_program("runc"), Ok)?;
        let cni_bin_dir = options.cni_bin_dir.clone().map_or_else(host::find_cni_plugins, Ok)?;
        let version = host::containerd_version(&containerd)?;

        make_dir(&options.dir, 0o711)?;
        let dir = options.dir.canonicalize().map_err(Error::file("resolve", &options.dir))?;
        let socket = dir.join("containerd.sock");
        // The ttrpc socket beside it has the longer name.
        let longest = dir.join("containerd.sock.ttrpc");
        if longest.as_os_str().len() > SOCKET_PATH_MAX {
            return Err(Error::SocketPath { path: longest, max: SOCKET_PATH_MAX });
        }

        let lock_dir = options.lock_dir.clone();
        let index = {
            let dir = dir.clone();
            blocking(move || take_index(&lock_dir, &dir)).await?
        };
        let names = index.names();

        let owned = own(&options.owned)?;
        let record = Record {
            index: index.number(),
            keep_pods: options.keep_pods,
            socket: socket.clone(),
            owned: owned.clone(),
        };
        record.write(&dir)?;

        let [root, state, conf, data, cdi] =
            ["root", "state", "cni/conf", "cni/data", CDI].map(|d| dir.join(d));
        for made in [&root, &state, &conf, &data, &cdi] {
            make_dir(made, 0o711)?;
        }
        let iptables = host::iptables_works();
        let conflist =
            cni::conflist(names, options.families, &data, options.masquerade && iptables, iptables);
        write(&conf.join("10-quintlet.conflist"), &serde_json::to_vec_pretty(&conflist).unwrap_or_default())?;
        let config = config::render(&ContainerdSettings {
            version,
            root: &root,
            state: &state,
            socket: &socket,
            runc: &runc,
            cni_bin_dir: &cni_bin_dir,
            cni_conf_dir: &conf,
            cdi_dir: &cdi,
            sandbox_image: images::PAUSE,
            snapshotter: if host::overlay_works(&dir) { "overlayfs" } else { "native" },
            may_lower_oom_score: host::has_sys_resource(),
        })
        .map_err(|e| Error::Program {
            program: "rendering config.toml".to_owned(),
            message: e.to_string(),
        })?;
        write(&dir.join("config.toml"), config.as_bytes())?;

        let first: Vec<&Path> = [containerd.parent(), runc.parent()].into_iter().flatten().collect();
        let mut node = Self {
            path: host::path_with(&first),
            log_file: options.log_file.clone().unwrap_or_else(|| dir.join("containerd.log")),
            traces: Traces { dir, socket, owned, names },
            binary: containerd,
            start_timeout: options.start_timeout,
            keep_pods: options.keep_pods,
            index: Some(index),
            child: None,
        };
        node.launch().await?;
        Ok(node)
    }

    /// Returns the gRPC socket, for the CRI and containerd's own services.
    pub fn socket(&self) -> &Path {
        &self.traces.socket
    }

    /// Returns the socket as a runtime endpoint (`unix:///…`).
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.traces.socket.display())
    }

    /// Returns the directory of the instance.
    pub fn dir(&self) -> &Path {
        &self.traces.dir
    }

    /// Returns the directory of the instance's files of the Container Device Interface. containerd 1.6 does
    /// not read them.
    pub fn cdi_dir(&self) -> PathBuf {
        self.traces.dir.join(CDI)
    }

    /// Returns the names of bridge, subnet and cgroup root.
    pub fn names(&self) -> Names {
        self.traces.names
    }

    /// Returns the root of the pods' cgroups. Pods must use it, so that their cgroups are found at the end.
    pub fn cgroup_root(&self) -> String {
        self.traces.names.cgroup_root()
    }

    /// Returns the file of containerd's log.
    pub fn log_file(&self) -> &Path {
        &self.log_file
    }

    /// Returns the process ID, if containerd runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// Fails if containerd does not accept it.
    pub async fn channel(&self) -> Result<Channel, Error> {
        cri::connect(&self.traces.socket).await
    }

    /// Creates the pause and busybox images and imports them. Returns their names.
    ///
    /// # Errors
    /// Fails if they cannot be created or imported.
    pub async fn import_local_images(&self) -> Result<Vec<String>, Error> {
        self.import_images(blocking(images::local_archives).await?).await
    }

    /// Imports images from archives. Returns their names.
    ///
    /// # Errors
    /// Fails if an archive cannot be imported.
    pub async fn import_images(&self, archives: Vec<Vec<u8>>) -> Result<Vec<String>, Error> {
        let channel = self.channel().await?;
        let mut names = Vec::new();
        for archive in archives {
            names.extend(crate::import::import(channel.clone(), archive, None).await?);
        }
        Ok(names)
    }

    /// Stops containerd and leaves the pods running. The next start in this directory adopts them.
    pub async fn stop(mut self) {
        self.keep_pods = true;
        self.end_process().await;
    }

    /// Removes all pods, stops containerd and removes all of its traces.
    ///
    /// # Errors
    /// Returns [`Error::Leftovers`] if something could not be removed.
    pub async fn down(mut self) -> Result<(), Error> {
        // A suspended process does not respond.
        self.signal(Signal::SIGCONT);
        if self.child.is_some() {
            let removal = async {
                let channel = self.channel().await?;
                cri::remove_all_pods(channel, GRACEFUL).await
            };
            match tokio::time::timeout(GRACEFUL, removal).await {
                Ok(Ok(pods)) => tracing::debug!(pods, "pods removed"),
                Ok(Err(e)) => tracing::warn!(error = %e, "pod removal through CRI failed"),
                Err(_) => tracing::warn!("pod removal through CRI timed out"),
            }
        }
        self.end_process().await;
        let traces = self.traces.clone();
        let leftovers = blocking(move || {
            traces.remove();
            traces.leftovers()
        })
        .await;
        // Drop has nothing to do: what remains cannot be removed.
        self.keep_pods = true;
        if !leftovers.is_empty() {
            return Err(Error::Leftovers(leftovers));
        }
        if let Some(index) = self.index.take() {
            index.release();
        }
        Ok(())
    }

    /// Returns the data by which the instance's traces are found, also after it is down.
    pub fn traces(&self) -> Traces {
        self.traces.clone()
    }

    /// Returns the instance's traces: all of them while it runs, none after [`Containerd::down`].
    pub fn leftovers(&self) -> Vec<String> {
        self.traces.leftovers()
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
        }
    }

    /// Starts the containerd process. Pods of an earlier process continue to run.
    ///
    /// # Errors
    /// Fails if it does not respond in time.
    pub async fn launch(&mut self) -> Result<(), Error> {
        let log_path = self.log_file.clone();
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log_path)
            .map_err(Error::file("open", &log_path))?;
        let stdout = log.try_clone().map_err(Error::file("open", &log_path))?;
        let mut child = Command::new(&self.binary)
            .arg("--config")
            .arg(self.traces.dir.join("config.toml"))
            .env("PATH", &self.path)
            // containerd would notify systemd of its start, in the name of the owner's unit.
            .env_remove("NOTIFY_SOCKET")
            .current_dir(&self.traces.dir)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(log)
            // Ctrl-C in the terminal is for the owner only.
            .process_group(0)
            // If the owner exits without a shutdown; pods stay if they are to be kept.
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| Error::Program {
                program: self.binary.display().to_string(),
                message: e.to_string(),
            })?;
        let ready = wait_ready(&self.traces.socket, &mut child, self.start_timeout).await;
        self.child = Some(child);
        ready.map_err(|why| Error::NotReady {
            seconds: self.start_timeout.as_secs(),
            why,
            log: last_lines(&log_path, 15),
        })
    }

    /// Stops the containerd process with SIGTERM, or with SIGKILL if it does not exit in time. Pods continue
    /// to run.
    pub async fn end_process(&mut self) {
        // A suspended process does not handle SIGTERM.
        self.signal(Signal::SIGCONT);
        self.signal(Signal::SIGTERM);
        if let Some(mut child) = self.child.take()
            && tokio::time::timeout(TERM_GRACE, child.wait()).await.is_err()
        {
            let _ = child.kill().await;
        }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if self.keep_pods {
            return;
        }
        self.traces.remove();
        if self.traces.leftovers().is_empty()
            && let Some(index) = self.index.take()
        {
            index.release();
        }
    }
}

/// Returns the index of an instance in `dir`. Before that, it removes the traces of dead instances and stops
/// the processes of a kept one in `dir`.
fn take_index(lock_dir: &Path, dir: &Path) -> Result<Index, Error> {
    remove_abandoned(lock_dir);
    let index = match Record::read(dir) {
        Some(record) => {
            let index = index::take(lock_dir, dir, Some(record.index))
                .map_err(|_| Error::InUse(dir.to_path_buf()))?;
            if record.keep_pods {
                record.traces(dir).kill_containerd();
            } else {
                // The lock file was removed, by a reboot for example.
                record.traces(dir).remove();
            }
            index
        }
        None => index::take(lock_dir, dir, None)?,
    };
    forwarding::hold(lock_dir, index.number())?;
    make_dir(dir, 0o711)?;
    Ok(index)
}

/// Removes every instance whose owner has exited, except those to be kept.
fn remove_abandoned(lock_dir: &Path) {
    for (index, dir) in index::abandoned(lock_dir) {
        let Some(record) = Record::read(&dir) else {
            // The owner was killed before it wrote the record, or the directory was deleted: the traces are
            // found by the names.
            if !dir.join("root").exists() {
                let socket = dir.join("containerd.sock");
                Traces { dir, socket, owned: Vec::new(), names: index.names() }.remove();
                index.release();
            }
            continue;
        };
        if record.index != index.number() || record.keep_pods {
            continue;
        }
        tracing::info!(dir = %dir.display(), "removing leftovers of an earlier run");
        let traces = record.traces(&dir);
        traces.remove();
        if traces.leftovers().is_empty() {
            index.release();
        }
    }
}

/// Marks directories that are new or empty. Returns the marked directories, resolved.
fn own(wanted: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let mut owned = Vec::new();
    for dir in wanted {
        make_dir(dir, 0o755)?;
        let marker = dir.join(MARKER);
        let empty = std::fs::read_dir(dir).map_err(Error::file("read", dir))?.next().is_none();
        if empty {
            write(&marker, b"")?;
        }
        if empty || marker.exists() {
            owned.push(dir.canonicalize().map_err(Error::file("resolve", dir))?);
        } else {
            tracing::info!(dir = %dir.display(), "directory existed before, keeping it");
        }
    }
    Ok(owned)
}

fn make_dir(dir: &Path, mode: u32) -> Result<(), Error> {
    std::fs::DirBuilder::new().recursive(true).mode(mode).create(dir).map_err(Error::file("create", dir))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    std::fs::write(path, bytes).map_err(Error::file("write", path))
}

async fn wait_ready(socket: &Path, child: &mut Child, timeout: Duration) -> Result<(), String> {
    let deadline = Instant::now() + timeout;
    let mut why = String::from("never asked");
    while Instant::now() < deadline {
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("it ended: {status}"));
        }
        let version_call = async { cri::version(cri::connect(socket).await?).await };
        match tokio::time::timeout_at(deadline, version_call).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(e)) => why = e.to_string(),
            Err(_) => why = String::from("no answer"),
        }
        tokio::time::sleep(READY_STEP).await;
    }
    Err(why)
}

fn last_lines(path: &Path, count: usize) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

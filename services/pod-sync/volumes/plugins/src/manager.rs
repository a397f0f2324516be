//! The task that registers plugins.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::Watcher as _;
use quintlet_kit::{queue, task, timers};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::handler::{Plugin, PluginHandler};
use crate::plan::{Retry, World, plan};
use crate::register::{Handlers, RegisterError, register};
use crate::scan::{Refusal, Scan, SocketId, scan};

/// Interval between two scans of the registration directory without a notification. A socket in a new
/// subdirectory may be older than the watch of that subdirectory.
pub(crate) const RESCAN: Duration = Duration::from_secs(10);
/// Interval between two scans of a directory that cannot be watched, for example because it does not exist
/// yet.
const RESCAN_UNWATCHED: Duration = Duration::from_secs(1);
/// Capacity of the channel of finished operations: one per socket, and a socket with an operation in flight
/// gets no other one.
const FINISHED: usize = 64;

/// The state of a socket in the registration directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginState {
    /// The registration is in flight.
    Registering,
    /// The plugin is registered.
    Registered(Plugin),
    /// The last attempt failed, and another one follows.
    Failed {
        /// Text of the error.
        error: String,
    },
    /// The entry is never used.
    Refused(Refusal),
}

/// The handle of the manager's task.
#[derive(Debug)]
pub struct PluginManager {
    states: watch::Receiver<BTreeMap<PathBuf, PluginState>>,
    task: JoinHandle<()>,
}

impl PluginManager {
    /// Starts to register the plugins below `dir`, until `stop` is cancelled. Each plugin type needs a
    /// handler.
    #[must_use]
    pub fn start(
        dir: PathBuf,
        handlers: HashMap<String, Arc<dyn PluginHandler>>,
        stop: CancellationToken,
    ) -> Self {
        let (publish, states) = watch::channel(BTreeMap::new());
        let (finished, results) = queue::channel("plugin-calls", FINISHED);
        let run = Run {
            dir,
            handlers: Arc::new(handlers),
            world: World::default(),
            plugins: HashMap::new(),
            failures: HashMap::new(),
            refused: BTreeMap::new(),
            publish,
            finished,
        };
        Self { states, task: task::spawn("plugin manager", run.run(results, stop)) }
    }

    /// Returns the states of all sockets, as they change.
    #[must_use]
    pub fn states(&self) -> watch::Receiver<BTreeMap<PathBuf, PluginState>> {
        self.states.clone()
    }

    /// Waits until the task has ended. Registrations in flight end by themselves.
    pub async fn stopped(self) {
        // A panic of the task ends the process.
        let _ = self.task.await;
    }
}

/// Result of an operation on a socket.
struct Finished {
    path: PathBuf,
    id: SocketId,
    done: Done,
}

enum Done {
    Registered(Plugin, Arc<dyn PluginHandler>),
    Failed(String),
    Deregistered,
}

struct Run {
    dir: PathBuf,
    handlers: Arc<Handlers>,
    world: World,
    plugins: HashMap<PathBuf, (Plugin, Arc<dyn PluginHandler>)>,
    failures: HashMap<PathBuf, String>,
    refused: BTreeMap<PathBuf, Refusal>,
    publish: watch::Sender<BTreeMap<PathBuf, PluginState>>,
    finished: mpsc::Sender<Finished>,
}

impl Run {
    async fn run(mut self, mut results: mpsc::Receiver<Finished>, stop: CancellationToken) {
        let (wake, mut changed) = queue::wakes();
        let mut watched: Option<(u64, notify::RecommendedWatcher)> = None;
        loop {
            let (dir, wake) = (self.dir.clone(), wake.clone());
            let before = watched.take();
            let (after, scanned) = task::blocking(move || (rewatch(&dir, before, &wake), scan(&dir))).await;
            watched = after;
            match scanned {
                Ok(scan) => self.observe(scan),
                Err(error) => {
                    tracing::error!(directory = %self.dir.display(), %error, "failed to read the plugin directory");
                }
            }
            let next = self.start_operations();
            self.publish_states();
            let period = if watched.is_some() { RESCAN } else { RESCAN_UNWATCHED };
            let rescan = timers::next_tick(period);
            let wait = tokio::time::sleep_until(next.map_or(rescan, |next| next.min(rescan)));
            // Each arm only receives: dropping it loses nothing.
            tokio::select! {
                () = stop.cancelled() => return,
                () = wait => {}
                Some(()) = changed.recv() => {}
                Some(finished) = results.recv() => {
                    self.finish(finished);
                    while let Ok(finished) = results.try_recv() {
                        self.finish(finished);
                    }
                }
            }
        }
    }

    fn observe(&mut self, scan: Scan) {
        for (path, refusal) in &scan.refused {
            if self.refused.get(path) != Some(refusal) {
                tracing::warn!(path = %path.display(), reason = %refusal, "plugin socket refused");
            }
        }
        self.refused = scan.refused;
        self.world.retries.retain(|path, retry| scan.sockets.get(path) == Some(&retry.id));
        self.failures.retain(|path, _| scan.sockets.contains_key(path));
        self.world.desired = scan.sockets;
    }

    /// Starts the operations that are due. Returns when to plan again at the latest.
    fn start_operations(&mut self) -> Option<Instant> {
        let plan = plan(&self.world, Instant::now());
        for path in plan.deregister {
            let Some(id) = self.world.actual.remove(&path) else { continue };
            let Some((plugin, handler)) = self.plugins.remove(&path) else { continue };
            self.world.busy.insert(path.clone());
            let finished = self.finished.clone();
            drop(task::spawn("plugin deregistration", async move {
                tracing::info!(plugin = plugin.name, socket = %path.display(), "plugin deregistered");
                handler.deregister(&plugin).await;
                // Without a receiver the manager has stopped.
                let _ = finished.send(Finished { path, id, done: Done::Deregistered }).await;
            }));
        }
        for (path, id) in plan.register {
            self.world.busy.insert(path.clone());
            let (finished, handlers) = (self.finished.clone(), Arc::clone(&self.handlers));
            drop(task::spawn("plugin registration", async move {
                let done = contained(&path, handlers).await;
                let _ = finished.send(Finished { path, id, done }).await;
            }));
        }
        plan.next
    }

    fn finish(&mut self, Finished { path, id, done }: Finished) {
        self.world.busy.remove(&path);
        match done {
            Done::Registered(plugin, handler) => {
                tracing::info!(plugin = plugin.name, kind = plugin.kind, socket = %path.display(), "plugin registered");
                self.world.retries.remove(&path);
                self.failures.remove(&path);
                self.plugins.insert(path.clone(), (plugin, handler));
                self.world.actual.insert(path, id);
            }
            Done::Failed(error) => {
                tracing::warn!(socket = %path.display(), error, "plugin registration failed, retrying");
                let retry = Retry::after(self.world.retries.get(&path), id, Instant::now());
                self.world.retries.insert(path.clone(), retry);
                self.failures.insert(path, error);
            }
            Done::Deregistered => {}
        }
    }

    fn publish_states(&self) {
        let mut states: BTreeMap<PathBuf, PluginState> = BTreeMap::new();
        for (path, refusal) in &self.refused {
            states.insert(path.clone(), PluginState::Refused(refusal.clone()));
        }
        for path in self.world.desired.keys() {
            let state = match (self.plugins.get(path), self.failures.get(path)) {
                (Some((plugin, _)), _) => PluginState::Registered(plugin.clone()),
                (None, Some(error)) => PluginState::Failed { error: error.clone() },
                (None, None) => PluginState::Registering,
            };
            states.insert(path.clone(), state);
        }
        self.publish.send_if_modified(|old| {
            let changed = *old != states;
            *old = states;
            changed
        });
    }
}

/// Registers a plugin. A panic of its handler is a failed registration.
async fn contained(path: &Path, handlers: Arc<Handlers>) -> Done {
    let socket = path.to_owned();
    let work = async move { register(&socket, &handlers).await };
    match task::spawn_contained("plugin registration call", None, work).await {
        Ok(Ok(Ok((plugin, handler)))) => Done::Registered(plugin, handler),
        Ok(Ok(Err(error))) => Done::Failed(RegisterError::to_string(&error)),
        Ok(Err(panic)) => Done::Failed(format!("handler panicked: {}", panic.message)),
        Err(error) => Done::Failed(error.to_string()),
    }
}

/// Watches the directory, and again if it was replaced. Without a watcher, scans find changes.
fn rewatch(
    dir: &Path,
    watched: Option<(u64, notify::RecommendedWatcher)>,
    wake: &mpsc::Sender<()>,
) -> Option<(u64, notify::RecommendedWatcher)> {
    use std::os::unix::fs::MetadataExt as _;
    let inode = std::fs::metadata(dir).ok()?.ino();
    if let Some(watched) = watched.filter(|(watched_inode, _)| *watched_inode == inode) {
        return Some(watched);
    }
    let wake = wake.clone();
    let woken = move |_: notify::Result<notify::Event>| {
        queue::wake(&wake);
    };
    // Without reads: the scan reads, too.
    let changes = notify::Config::default().with_event_kinds(notify::EventKindMask::CORE);
    let started = notify::RecommendedWatcher::new(woken, changes).and_then(|mut watcher| {
        watcher.watch(dir, notify::RecursiveMode::Recursive)?;
        Ok(watcher)
    });
    match started {
        Ok(watcher) => Some((inode, watcher)),
        Err(error) => {
            tracing::warn!(directory = %dir.display(), %error, "cannot watch the plugin directory, only scanning it");
            None
        }
    }
}

//! Runs the driver in a thread of the test's process.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use clap::Parser as _;
use tokio::sync::oneshot;

use crate::fault;
use crate::serve::{Args, serve};
use crate::volumes::Volumes;

/// A running driver. Dropping it ends the driver as a crash does: its sockets stay. Faults that end the
/// process end the test.
#[derive(Debug)]
pub struct DriverThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    state: PathBuf,
}

impl DriverThread {
    /// Starts the driver for a root directory, with its state in `state` and more arguments of the binary.
    ///
    /// # Panics
    /// Panics if the arguments are invalid, or if the driver cannot serve.
    #[must_use]
    pub fn start(root: &Path, state: &Path, more: &[&str]) -> Self {
        std::fs::create_dir_all(state).expect("the directory of the driver can be created");
        let paths = [root, state].map(|path| path.display().to_string());
        let line = ["csi-driver", "--root", &paths[0], "--state", &paths[1]];
        let args = Args::try_parse_from(line.into_iter().chain(more.iter().copied()));
        let args = args.expect("the arguments of the driver are valid");
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async {
                // Dropping the runtime ends the calls in flight.
                tokio::select! {
                    served = serve(args) => served.expect("the driver serves"),
                    _ = stopped => {}
                }
            });
        });
        Self { stop: Some(stop), thread: Some(thread), state: state.to_owned() }
    }

    /// Returns the state directory.
    #[must_use]
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Returns the path of the backing store of a volume.
    ///
    /// # Panics
    /// Panics if the state directory cannot be used.
    #[must_use]
    pub fn backing(&self, handle: &str) -> PathBuf {
        Volumes::new(&self.state).expect("the state directory exists").backing(handle)
    }

    /// Returns the number of calls that begin with a method, or with a method and a volume.
    #[must_use]
    pub fn calls_of(&self, call: &str) -> usize {
        fault::calls(&self.state).iter().filter(|made| made.starts_with(call)).count()
    }
}

impl Drop for DriverThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A panic of the driver was printed, and the test has failed by it.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

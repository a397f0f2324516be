//! Looks for moments at which the whole process rests, and lets the clock jump.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::Ordering;

use nix::libc;

use crate::kernel::{self, Nanos};
use crate::waits;

/// Interval between looks while the process works, which bounds what they cost.
const BUSY: Nanos = 200_000;
/// Interval between looks while it may rest.
const QUIET: Nanos = 50_000;
/// How late a deadline may be observed, so that deadlines close to each other need one jump. The machine's clock is as coarse for tokio.
const SLACK: Nanos = 1_000_000;
/// Processor time that passes between two looks at the processor time. A thread that is woken uses more.
const LOOK: Nanos = 2_000;

/// Starts the thread that looks.
pub(crate) fn watch() {
    std::thread::Builder::new()
        .name("virtual-time".to_owned())
        .spawn(|| {
            let own = OsString::from(kernel::thread().to_string());
            let mut threads = Threads::default();
            let mut before: Option<Nanos> = None;
            loop {
                let used = processor_time_of_others();
                let is_quiet = before.is_some_and(|before| used - before <= LOOK);
                before = Some(used);
                if is_quiet && jump(&mut threads, &own, used) {
                    // The woken threads use the processor: the next look finds that they do.
                    before = None;
                }
                kernel::sleep(if is_quiet { QUIET } else { BUSY });
            }
        })
        .expect("a thread can be made");
}

/// Returns the processor time of the process without that of the calling thread.
fn processor_time_of_others() -> Nanos {
    kernel::now(libc::CLOCK_PROCESS_CPUTIME_ID) - kernel::now(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Lets the clock jump to the nearest deadline if nothing runs. Returns whether it did. `used` is the processor time that the other
/// threads have used before.
fn jump(threads: &mut Threads, own: &OsStr, used: Nanos) -> bool {
    // A thread that is woken by another one after it was looked at makes the other one use the processor.
    if !threads.rest(own) || kernel::has_children() || processor_time_of_others() - used > LOOK {
        return false;
    }
    let Some(deadline) = waits::nearest() else { return false };
    let (now, deadline) = (waits::now(), deadline + SLACK);
    if deadline > now {
        crate::AHEAD.fetch_add(deadline - now, Ordering::SeqCst);
    }
    waits::wake(deadline.max(now));
    true
}

/// The threads of the process, except the one that looks.
#[derive(Debug, Default)]
struct Threads {
    // The `stat` of each thread that was seen: it is read again without being opened again.
    stats: HashMap<OsString, File>,
}

impl Threads {
    /// Returns whether each thread sleeps. A thread that was woken and does not run yet does not sleep.
    fn rest(&mut self, own: &OsStr) -> bool {
        let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return false };
        threads.flatten().map(|thread| thread.file_name()).filter(|id| id != own).all(|id| {
            // A thread that has ended since the list does not run. Its ID may be given to another one.
            let state = self.state(&id).or_else(|| {
                let stat = File::open(Path::new("/proc/self/task").join(&id).join("stat")).ok()?;
                self.stats.insert(id.clone(), stat);
                self.state(&id)
            });
            !matches!(state, Some(b'R' | b'D'))
        })
    }

    fn state(&self, id: &OsStr) -> Option<u8> {
        let mut stat = [0; 128];
        let length = self.stats.get(id)?.read_at(&mut stat, 0).ok()?;
        // The state follows the name in brackets, which has at most 16 characters, any of them.
        let end = stat[..length].iter().rposition(|byte| *byte == b')')?;
        stat.get(end + 2).copied()
    }
}

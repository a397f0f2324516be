//! Looks for moments at which the whole process rests, and lets the clock jump.

use std::collections::HashMap;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;

use nix::libc;
use rustix::fs::{RawDir, SeekFrom};

use crate::clock::AHEAD;
use crate::kernel::{self, Nanos};
use crate::waits;

/// Directory of the threads of this process.
const TASKS: &str = "/proc/self/task";
/// Longest interval between looks, while the process works. It bounds what they cost.
const BUSY: Nanos = 400_000;
/// Interval between a jump and the next look. Each later one is twice as long, up to [`BUSY`].
const QUIET: Nanos = 50_000;
/// How late a deadline may be observed, so that deadlines close to each other need one jump. The machine's
/// clock is as coarse for tokio.
const SLACK: Nanos = 1_000_000;
/// Processor time that passes between two looks at the processor time. A thread that is woken uses more.
const LOOK: Nanos = 2_000;

/// Starts the thread that looks.
pub(crate) fn watch() {
    std::thread::Builder::new()
        .name("virtual-time".to_owned())
        .spawn(|| {
            let mut threads = Threads::new();
            let mut before: Option<Nanos> = None;
            let mut interval = QUIET;
            loop {
                let used = processor_time_of_others();
                let is_quiet = before.is_some_and(|before| used - before <= LOOK);
                let has_jumped = is_quiet && jump(&mut threads, used);
                // The woken threads use the processor: the next look finds that they do.
                before = (!has_jumped).then_some(used);
                interval = if has_jumped { QUIET } else { (interval * 2).min(BUSY) };
                kernel::sleep(interval);
            }
        })
        .expect("a thread can be made");
}

/// Returns the processor time of the process without that of the calling thread.
fn processor_time_of_others() -> Nanos {
    kernel::now(libc::CLOCK_PROCESS_CPUTIME_ID) - kernel::now(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Lets the clock jump to the nearest deadline if nothing runs. Returns whether it did. `used` is the
/// processor time that the other threads have used before.
fn jump(threads: &mut Threads, used: Nanos) -> bool {
    // A thread that is woken by another one after it was looked at makes the other one use the processor.
    if !threads.rest() || kernel::has_children() || processor_time_of_others() - used > LOOK {
        return false;
    }
    let Some(deadline) = waits::nearest() else { return false };
    let (now, deadline) = (waits::now(), deadline + SLACK);
    if deadline > now {
        AHEAD.fetch_add(deadline - now, Ordering::SeqCst);
    }
    waits::wake(deadline.max(now));
    true
}

/// The threads of the process, except the one that looks. A look allocates nothing unless there is a new
/// thread: tests count allocations.
#[derive(Debug)]
struct Threads {
    own: i32,
    tasks: File,
    list: Box<[MaybeUninit<u8>]>,
    // The `stat` of each thread that was seen: it is read again without being opened again.
    stats: HashMap<i32, File>,
    // The number of links of `tasks`, which grows with the threads, at the time of the last list.
    links: u64,
    // The thread that ran at the last look, which most probably still does.
    last: Option<i32>,
}

impl Threads {
    /// Returns the threads apart from the calling one.
    fn new() -> Self {
        let tasks = File::open(TASKS).expect("a process has a list of its threads");
        let list = Box::new([MaybeUninit::uninit(); 8192]);
        Self { own: kernel::thread(), tasks, list, stats: HashMap::new(), links: 0, last: None }
    }

    /// Returns whether each thread sleeps. A thread that was woken and does not run yet does not sleep.
    fn rest(&mut self) -> bool {
        // The list of threads and their states cost more than this one.
        if self.last.and_then(|id| self.stats.get(&id)).and_then(state).is_some_and(runs) {
            return false;
        }
        let Ok(links) = rustix::fs::fstat(&self.tasks).map(|task| task.st_nlink) else { return false };
        if links == self.links
            && let Some(rest) = self.known_rest()
        {
            return rest;
        }
        self.links = links;
        self.listed_rest()
    }

    /// Returns whether each thread of the last list sleeps, or `None` if one of them has ended.
    fn known_rest(&mut self) -> Option<bool> {
        for (id, stat) in &self.stats {
            if runs(state(stat)?) {
                self.last = Some(*id);
                return Some(false);
            }
        }
        Some(true)
    }

    /// Lists the threads, and returns whether each of them sleeps.
    fn listed_rest(&mut self) -> bool {
        if rustix::fs::seek(&self.tasks, SeekFrom::Start(0)).is_err() {
            return false;
        }
        let mut listed = 0;
        let mut list = RawDir::new(&self.tasks, &mut self.list);
        while let Some(entry) = list.next() {
            let Ok(entry) = entry else { return false };
            // The other entries are `.` and `..`.
            let Some(id) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if id == self.own {
                continue;
            }
            listed += 1;
            // A thread that has ended since the list does not run. Its ID may be given to another one.
            let state = self.stats.get(&id).and_then(state).or_else(|| {
                let stat = File::open(format!("{TASKS}/{id}/stat")).ok()?;
                let state = state(&stat);
                self.stats.insert(id, stat);
                state
            });
            if state.is_some_and(runs) {
                self.last = Some(id);
                // The rest of the list is unknown.
                self.links = 0;
                return false;
            }
        }
        if self.stats.len() > listed {
            self.stats.retain(|_, stat| state(stat).is_some());
        }
        true
    }
}

/// Returns whether a thread in this state runs, or waits for a processor or a disk.
fn runs(state: u8) -> bool {
    matches!(state, b'R' | b'D')
}

/// Returns the state in a `stat` of a thread, or `None` if the thread has ended.
fn state(stat: &File) -> Option<u8> {
    let mut text = [0; 128];
    let length = stat.read_at(&mut text, 0).ok()?;
    // The state follows the name in brackets, which has at most 16 characters, any of them.
    let end = text[..length].iter().rposition(|byte| *byte == b')')?;
    text.get(end + 2).copied()
}

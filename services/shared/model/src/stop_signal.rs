//! Stop signals of containers: the names of the API and the numbers of the CRI (`runtime.v1.Signal`).

/// Names of signals by their number in the CRI, from 1 on; 0 leaves the choice to the runtime.
const NAMES: [&str; 65] = [
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGRTMIN",
    "SIGRTMIN+1",
    "SIGRTMIN+2",
    "SIGRTMIN+3",
    "SIGRTMIN+4",
    "SIGRTMIN+5",
    "SIGRTMIN+6",
    "SIGRTMIN+7",
    "SIGRTMIN+8",
    "SIGRTMIN+9",
    "SIGRTMIN+10",
    "SIGRTMIN+11",
    "SIGRTMIN+12",
    "SIGRTMIN+13",
    "SIGRTMIN+14",
    "SIGRTMIN+15",
    "SIGRTMAX-14",
    "SIGRTMAX-13",
    "SIGRTMAX-12",
    "SIGRTMAX-11",
    "SIGRTMAX-10",
    "SIGRTMAX-9",
    "SIGRTMAX-8",
    "SIGRTMAX-7",
    "SIGRTMAX-6",
    "SIGRTMAX-5",
    "SIGRTMAX-4",
    "SIGRTMAX-3",
    "SIGRTMAX-2",
    "SIGRTMAX-1",
    "SIGRTMAX",
];

/// Returns the CRI's number of a signal of the API.
#[must_use]
pub fn number(name: &str) -> Option<i32> {
    let place = NAMES.iter().position(|s| *s == name)?;
    i32::try_from(place.saturating_add(1)).ok()
}

/// Returns the API's name of a signal of the CRI. 0 has none: the runtime does not report the signal. Neither
/// has a number of a later CRI.
#[must_use]
pub fn name(number: i32) -> Option<&'static str> {
    let place = usize::try_from(number).ok()?.checked_sub(1)?;
    NAMES.get(place).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_the_cri() {
        for (signal, of_cri) in
            [("SIGABRT", 1), ("SIGINT", 10), ("SIGKILL", 13), ("SIGTERM", 23), ("SIGUSR1", 29)]
                .into_iter()
                .chain([("SIGRTMIN", 35), ("SIGRTMIN+15", 50), ("SIGRTMAX-14", 51), ("SIGRTMAX", 65)])
        {
            assert_eq!((number(signal), name(of_cri)), (Some(of_cri), Some(signal)));
        }
        assert_eq!((number("TERM"), number("")), (None, None));
        assert_eq!([0, -1, 66, i32::MIN, i32::MAX].map(name), [None; 5]);
    }
}

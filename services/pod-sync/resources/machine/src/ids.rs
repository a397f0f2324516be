//! Numbers of the parts of a machine, as Linux has them.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name($number);

        impl $name {
            /// Returns the number that Linux gives it.
            #[must_use]
            pub const fn number(self) -> $number {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

macro_rules! free_id {
    ($(#[$doc:meta])* $name:ident($number:ty)) => {
        id! { $(#[$doc])* $name($number) }

        impl $name {
            /// Returns the ID with this number.
            #[must_use]
            pub const fn new(number: $number) -> Self {
                Self(number)
            }
        }
    };
}

free_id! {
    /// A logical CPU: a hardware thread.
    CpuId(u32)
}
free_id! {
    /// A physical core, by its lowest CPU. Unlike `core_id` in sysfs it is unique in the machine.
    CoreId(u32)
}
free_id! {
    /// A physical package. Linux numbers it -1 where the firmware has none.
    SocketId(i64)
}
free_id! {
    /// A last-level cache that some cores of a NUMA node share. If all of them share it, the number is that
    /// of the socket.
    CacheId(i64)
}
id! {
    /// A NUMA node. Its number is below 64, as in the kubelet.
    NumaNode(u8)
}

/// A number of a NUMA node is above 63.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("NUMA node {0} is not supported, the highest is 63")]
pub struct InvalidNumaNode(pub u64);

impl NumaNode {
    /// Number of values.
    pub const COUNT: u8 = 64;

    /// Returns all nodes that can exist, in ascending order.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..Self::COUNT).map(Self)
    }
}

impl TryFrom<u64> for NumaNode {
    type Error = InvalidNumaNode;

    fn try_from(number: u64) -> Result<Self, InvalidNumaNode> {
        let small = u8::try_from(number).ok().filter(|small| *small < Self::COUNT);
        small.map(Self).ok_or(InvalidNumaNode(number))
    }
}

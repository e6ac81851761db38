//! Values of a word in shared memory, and their names.

/// Declares the values that an honest client stores: a constant for each, as it lies in memory, where a peer may have
/// stored anything; and an enum of their names. Code that has to say something about every value matches on the names,
/// and does not compile when there is a new one.
#[macro_export]
macro_rules! named {
    ($value:ty, $make:path => $names:ident;
     $($(#[$doc:meta])* $constant:ident: $name:ident = $number:literal;)*) => {
        $($(#[$doc])* pub const $constant: $value = $make($number);)*

        /// The names of these values.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $names {
            $(#[doc = concat!("[`", stringify!($constant), "`]")] $name,)*
        }

        impl $names {
            /// All of them.
            pub const ALL: &'static [$names] = &[$($names::$name,)*];

            /// The value in memory.
            pub const fn value(self) -> $value {
                match self {
                    $($names::$name => $constant,)*
                }
            }

            /// The name of a value; none if no honest client stores it.
            pub fn of(value: $value) -> Option<$names> {
                $names::ALL.iter().copied().find(|n| n.value() == value)
            }
        }
    };
}

// Every system call of the kernel, and what this library does with it. The hooks of `syscall()` are generated from
// this list (`number.rs`), and `tests/tests/numbers.rs` compares it with the symbols that the library exports and
// with the kernel's own list of numbers.
//
// Both include this file as text, so that they cannot diverge.
//
// `hooks`: number, count of words, function, and the exported symbols that make this call.
// `symbols`: exported functions of the C library that have no number of their own.
// `passes`: numbers that are passed to the kernel unchanged, with the reason why that is right.
macro_rules! calls {
    ($with:ident) => {
        $with! {
            hooks {
                SYS_read c3 rw::read [read __read_chk];
                SYS_write c3 rw::write [write];
                SYS_readv c3 rw::readv [readv];
                SYS_writev c3 rw::writev [writev];
                SYS_preadv2 c6 number::preadv2 [preadv2 preadv64v2];
                SYS_pwritev2 c6 number::pwritev2 [pwritev2 pwritev64v2];
                SYS_sendto c6 rw::sendto [send sendto];
                SYS_recvfrom c6 rw::recvfrom [recv recvfrom __recv_chk __recvfrom_chk];
                SYS_sendmsg c3 msg::sendmsg [sendmsg];
                SYS_recvmsg c3 msg::recvmsg [recvmsg];
                SYS_sendmmsg c4 msg::sendmmsg [sendmmsg];
                SYS_recvmmsg c5 msg::recvmmsg [recvmmsg];
                SYS_sendfile c4 rw::sendfile [sendfile sendfile64];
                SYS_splice c6 rw::splice [splice];
                SYS_tee c4 rw::tee [tee];
                SYS_vmsplice c4 rw::vmsplice [vmsplice];
                SYS_socket c3 sock::socket [socket];
                SYS_connect c3 sock::connect [connect];
                SYS_listen c2 sock::listen [listen];
                SYS_accept c3 sock::accept [accept];
                SYS_accept4 c4 sock::accept4 [accept4];
                SYS_shutdown c2 sock::shutdown [shutdown];
                SYS_getsockopt c5 sock::getsockopt [getsockopt];
                SYS_setsockopt c5 sock::setsockopt [setsockopt];
                SYS_ioctl c3 sock::ioctl [ioctl sockatmark];
                SYS_close c1 fd::close [close];
                SYS_exit_group c1 proc::_exit [_exit _Exit];
                SYS_close_range c3 fd::close_range [close_range closefrom];
                SYS_dup c1 fd::dup [dup];
                #[cfg(target_arch = "x86_64")] SYS_dup2 c2 fd::dup2 [dup2];
                SYS_dup3 c3 fd::dup3 [dup3];
                SYS_fcntl c3 fd::fcntl [fcntl fcntl64];
                #[cfg(target_arch = "x86_64")] SYS_open c3 make::open [open open64];
                SYS_openat c4 make::openat [openat openat64];
                #[cfg(target_arch = "x86_64")] SYS_creat c2 make::creat [creat creat64];
                #[cfg(target_arch = "x86_64")] SYS_pipe c1 make::pipe [pipe];
                SYS_pipe2 c2 make::pipe2 [pipe2];
                SYS_socketpair c4 make::socketpair [socketpair];
                SYS_eventfd2 c2 make::eventfd [eventfd];
                SYS_timerfd_create c2 make::timerfd_create [timerfd_create];
                #[cfg(target_arch = "x86_64")] SYS_inotify_init c0 make::inotify_init [inotify_init];
                SYS_inotify_init1 c1 make::inotify_init1 [inotify_init1];
                SYS_memfd_create c2 make::memfd_create [memfd_create];
                SYS_pidfd_open c2 make::pidfd_open [pidfd_open];
                SYS_pidfd_getfd c3 make::pidfd_getfd [pidfd_getfd];
                #[cfg(target_arch = "x86_64")] SYS_poll c3 ready::poll [poll __poll_chk];
                SYS_ppoll c5 number::ppoll [ppoll __ppoll_chk];
                #[cfg(target_arch = "x86_64")] SYS_select c5 number::select [select];
                SYS_pselect6 c6 number::pselect6 [pselect];
                #[cfg(target_arch = "x86_64")] SYS_epoll_create c1 ready::epoll_create [epoll_create];
                SYS_epoll_create1 c1 ready::epoll_create1 [epoll_create1];
                SYS_epoll_ctl c4 ready::epoll_ctl [epoll_ctl];
                #[cfg(target_arch = "x86_64")] SYS_epoll_wait c4 ready::epoll_wait [epoll_wait];
                SYS_epoll_pwait c6 number::epoll_pwait [epoll_pwait];
                SYS_epoll_pwait2 c6 number::epoll_pwait2 [epoll_pwait2];
                #[cfg(target_arch = "x86_64")] SYS_fork c0 number::fork [fork _Fork __fork daemon forkpty];
                #[cfg(target_arch = "x86_64")] SYS_vfork c0 number::vfork [];
                SYS_clone c5 number::clone [clone __clone];
                SYS_clone3 c2 number::clone3 [];
                SYS_io_uring_setup c2 uring::setup [];
                SYS_io_uring_enter c6 uring::enter [];
                SYS_io_uring_register c4 uring::register [];
                SYS_io_submit c3 uring::submit [];
                SYS_rt_sigaction c4 number::rt_sigaction [
                    sigaction __sigaction signal bsd_signal ssignal sysv_signal __sysv_signal
                    siginterrupt sigset
                ];
                SYS_munmap c2 memory::by_number::munmap [munmap];
                SYS_mprotect c3 memory::by_number::mprotect [mprotect];
                SYS_mremap c5 memory::by_number::mremap [mremap];
                SYS_pkey_mprotect c4 memory::by_number::pkey_mprotect [pkey_mprotect];
                SYS_shmdt c1 memory::by_number::shmdt [shmdt];
                SYS_setuid c1 user::by_number::setuid [setuid seteuid];
                SYS_setgid c1 user::by_number::setgid [setgid setegid];
                SYS_setreuid c2 user::by_number::setreuid [setreuid];
                SYS_setregid c2 user::by_number::setregid [setregid];
                SYS_setresuid c3 user::by_number::setresuid [setresuid];
                SYS_setresgid c3 user::by_number::setresgid [setresgid];
                SYS_setgroups c2 user::by_number::setgroups [setgroups initgroups];
                SYS_setfsuid c1 user::by_number::setfsuid [setfsuid];
                SYS_setfsgid c1 user::by_number::setfsgid [setfsgid];
                SYS_capset c2 user::by_number::capset [capset];
                SYS_unshare c1 proc::unshare [unshare];
                SYS_prctl c5 proc::prctl [prctl];
                SYS_seccomp c3 number::seccomp [];
                SYS_chroot c1 proc::chroot [chroot];
                SYS_pivot_root c2 number::pivot_root [];
                SYS_execve c3 proc::execve [execve execv execvp execvpe execl execlp execle fexecve];
                SYS_execveat c5 proc::execveat [execveat];
            }
            symbols {
                "goes through the hooks of this list" [syscall];
                "ends the process inside libc" [quick_exit];
                "streams and spawned programs use their descriptors inside libc" [
                    fdopen dprintf __dprintf_chk vdprintf __vdprintf_chk popen pclose system
                    posix_spawn posix_spawnp pidfd_spawn pidfd_spawnp
                    posix_spawn_file_actions_adddup2
                    posix_spawn_file_actions_init posix_spawn_file_actions_destroy
                ];
                "threads of libc's own use the descriptor" [
                    aio_read aio_read64 aio_write aio_write64 lio_listio
                ];
            }
            passes {
                "fails on sockets, or looks at the socket only" [
                    SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_lseek SYS_copy_file_range
                    SYS_ftruncate SYS_fallocate SYS_fsync SYS_fdatasync SYS_syncfs
                    SYS_sync_file_range SYS_readahead SYS_fadvise64 SYS_getdents SYS_getdents64
                    SYS_fchdir SYS_fstat SYS_newfstatat SYS_statx SYS_fstatfs SYS_fchmod
                    SYS_fchmodat SYS_fchown SYS_fchownat SYS_flock SYS_fsetxattr SYS_fgetxattr
                    SYS_flistxattr SYS_fremovexattr SYS_futimesat SYS_utimensat SYS_finit_module
                    SYS_kexec_file_load SYS_quotactl_fd SYS_remap_file_pages
                ];
                "the kernel's answer is right, and no byte of the stream moves" [
                    SYS_bind SYS_getsockname SYS_getpeername SYS_mmap SYS_kcmp
                ];
                "descriptors of another kind: the kernel refuses sockets" [
                    SYS_timerfd_settime SYS_timerfd_gettime SYS_inotify_add_watch
                    SYS_inotify_rm_watch SYS_fanotify_mark SYS_mq_timedsend SYS_mq_timedreceive
                    SYS_mq_notify SYS_mq_getsetattr SYS_setns SYS_pidfd_send_signal SYS_waitid
                    SYS_process_madvise SYS_process_mrelease SYS_fsconfig SYS_fsmount
                    SYS_move_mount SYS_mount_setattr SYS_landlock_add_rule
                    SYS_landlock_restrict_self SYS_perf_event_open SYS_signalfd SYS_signalfd4
                ];
                "a directory's descriptor" [
                    SYS_openat2 SYS_mkdirat SYS_mknodat SYS_unlinkat SYS_renameat
                    SYS_renameat2 SYS_linkat SYS_symlinkat SYS_readlinkat SYS_faccessat
                    SYS_faccessat2 SYS_name_to_handle_at SYS_open_by_handle_at SYS_open_tree
                    SYS_fspick
                ];
                "makes a descriptor that is no connection" [
                    SYS_eventfd SYS_fanotify_init SYS_memfd_secret SYS_userfaultfd SYS_mq_open SYS_fsopen
                    SYS_landlock_create_ruleset
                ];
                "no descriptor: what `io_submit` has begun" [
                    SYS_io_setup SYS_io_destroy SYS_io_getevents SYS_io_pgetevents SYS_io_cancel
                ];
                "may attach a program to a socket, which sees TCP" [SYS_bpf];
                "limits" [SYS_setrlimit SYS_getrlimit SYS_prlimit64];
                "the kernel has it no more, or never had" [
                    SYS_epoll_ctl_old SYS_epoll_wait_old SYS_getpmsg SYS_putpmsg SYS_uselib
                    SYS_ustat SYS_sysfs SYS__sysctl SYS_create_module SYS_get_kernel_syms
                    SYS_query_module SYS_nfsservctl SYS_afs_syscall SYS_tuxcall SYS_security
                    SYS_vserver SYS_lookup_dcookie SYS_set_thread_area SYS_get_thread_area
                ];
                "no descriptor: memory" [
                    SYS_brk SYS_msync SYS_mincore SYS_madvise
                    SYS_mlock SYS_mlock2 SYS_munlock SYS_mlockall SYS_munlockall SYS_mbind
                    SYS_set_mempolicy SYS_get_mempolicy SYS_set_mempolicy_home_node
                    SYS_migrate_pages SYS_move_pages SYS_pkey_alloc SYS_pkey_free
                    SYS_process_vm_readv SYS_process_vm_writev SYS_shmget SYS_shmat SYS_shmctl
                    SYS_modify_ldt SYS_arch_prctl SYS_membarrier SYS_rseq
                ];
                "no descriptor: signals, time, scheduling" [
                    SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending
                    SYS_rt_sigtimedwait SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo
                    SYS_rt_sigsuspend SYS_sigaltstack SYS_pause SYS_kill SYS_tkill SYS_tgkill
                    SYS_restart_syscall SYS_nanosleep SYS_clock_nanosleep SYS_getitimer
                    SYS_setitimer SYS_alarm SYS_time SYS_times SYS_gettimeofday SYS_settimeofday
                    SYS_adjtimex SYS_clock_settime SYS_clock_gettime SYS_clock_getres
                    SYS_clock_adjtime SYS_timer_create SYS_timer_settime SYS_timer_gettime
                    SYS_timer_getoverrun SYS_timer_delete SYS_sched_yield SYS_sched_setparam
                    SYS_sched_getparam SYS_sched_setscheduler SYS_sched_getscheduler
                    SYS_sched_get_priority_max SYS_sched_get_priority_min
                    SYS_sched_rr_get_interval SYS_sched_setaffinity SYS_sched_getaffinity
                    SYS_sched_setattr SYS_sched_getattr SYS_getpriority SYS_setpriority
                    SYS_ioprio_set SYS_ioprio_get SYS_futex SYS_futex_waitv SYS_set_robust_list
                    SYS_get_robust_list
                ];
                "no descriptor: processes and users" [
                    SYS_getpid SYS_gettid SYS_getppid SYS_getpgid SYS_getpgrp SYS_setpgid
                    SYS_getsid SYS_setsid SYS_getuid SYS_getgid SYS_geteuid SYS_getegid
                    SYS_getgroups SYS_getresuid SYS_getresgid SYS_capget SYS_wait4 SYS_exit
                    SYS_set_tid_address SYS_personality SYS_ptrace SYS_acct
                    SYS_getrusage SYS_umask SYS_getcpu SYS_getrandom
                ];
                "no descriptor: paths" [
                    SYS_stat SYS_lstat SYS_statfs SYS_access SYS_truncate SYS_getcwd SYS_chdir
                    SYS_rename SYS_mkdir SYS_rmdir SYS_link SYS_unlink SYS_symlink SYS_readlink
                    SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_mknod SYS_setxattr
                    SYS_lsetxattr SYS_getxattr SYS_lgetxattr SYS_listxattr SYS_llistxattr
                    SYS_removexattr SYS_lremovexattr SYS_mount
                    SYS_umount2 SYS_sync SYS_quotactl SYS_mq_unlink
                ];
                "no descriptor: the machine" [
                    SYS_uname SYS_sysinfo SYS_syslog SYS_sethostname SYS_setdomainname SYS_reboot
                    SYS_swapon SYS_swapoff SYS_vhangup SYS_iopl SYS_ioperm SYS_init_module
                    SYS_delete_module SYS_kexec_load SYS_add_key SYS_request_key SYS_keyctl
                    SYS_semget SYS_semop SYS_semctl SYS_semtimedop SYS_msgget SYS_msgsnd
                    SYS_msgrcv SYS_msgctl
                ];
            }
        }
    };
}

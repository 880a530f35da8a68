"""What counts as right: real reference answers, real model outputs with labels, and answers made to deceive.

The tables hold one case a line, `gold  ?  answer in the box`.
"""

import json
import random
import re
import time

import pytest
from conftest import ROOT, grades, judged, make_verifier

import common
from common import compare, last_boxed, reference_answer

SHARED = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: no real answers to grade")
one_in = pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.slow)])

RIGHT = r"""
\dfrac 3 8  ?  \frac{3}{8}
\frac{x}{10}  ?  0.1x
\frac{x}{3}+\frac{1}{5}  ?  0.2+\frac{x}{3}
58,500  ?  58500
58500  ?  58{,}500
58,500  ?  58,\!500
58500  ?  58,\! 500
58500  ?  58,500 \text{ dollars}
\$32,\!348  ?  32348
\$32,\!348  ?  \$32,348
12  ?  12.
12  ?  12.0
12  ?  +12
0.5  ?  \frac12
0.5  ?  \frac1{2}
0.5  ?  \frac{1}2
0.5  ?  \frac{1}{2.}
10  ?  \frac{1{,}000}{100}
0.5  ?  1/2
0.5  ?  .5
-\frac{1}{2}  ?  \frac{-1}{2}
-1./3  ?  -\frac{1}{3}
3.83e35  ?  3.83 \times 10^{35}
3.83e35  ?  3.83 \cdot 10^{35}
1e-3  ?  0.001
1\frac{4}{5}  ?  \frac{9}{5}
1\frac{4}{5}  ?  1.8
18\%  ?  18
18  ?  18\%
18\%  ?  18 percent
90^\circ  ?  90
90^{\circ}  ?  90^\circ
\frac{270}7\text{ degrees}  ?  \frac{270}{7}^\circ
864 \mbox{ inches}^2  ?  864
864 \mbox{ inches}^2  ?  864 \text{ square inches}
40\text{ feet}  ?  40\text{ ft}
40\text{ feet}  ?  40 ft
40\text{ feet}  ?  40 feet
20\text{ days}  ?  20
14 \text{ right triangles}  ?  14 \text{ triangles}
5.4 \text{ cents}  ?  5.4
(1,2)  ?  (1, 2)
(1,2)  ?  \left( 1, 2 \right)
(1,2)  ?  1,2
\{1,2\}  ?  \{2,1\}
\{1,2\}  ?  2,1
1,2  ?  \{1,2\}
$69$,$84$  ?  84, 69
1,3,5  ?  5, 3, 1
$f(x)=-1$,$f(x)=x+1$  ?  f(x)=x+1 \text{ and } f(x)=-1
19 \text{ and }43  ?  43, 19
-12 \text{ or } -30  ?  -30, -12
2, 3, \text{ and } 4  ?  4,3,2
(1,8,19), (2,7,13), (4,5,7)  ?  (4,5,7),(1,8,19),(2,7,13)
[1,2)  ?  \left[1, \dfrac{4}{2}\right)
(-\infty, 2) \cup (3, \infty)  ?  (3,\infty)\cup(-\infty,2)
x \in [-2,7]  ?  [-2,7]
-2 \le x \le 7  ?  [-2,7]
\text{Evelyn}  ?  Evelyn
\text{Evelyn}  ?  \text{evelyn}
\text{(C)}  ?  C
\text{(C)}  ?  (C)
\text{C}  ?  \textbf{(C)}
\text{A,C,F}  ?  A, C, F
\text{even}  ?  even
\text{13}  ?  13
\mathbf{2340}  ?  2340
52_8  ?  52_{8}
4210_{5}  ?  4210_5
\text{A5}_{11}  ?  A5_{11}
43_5.  ?  43_5
05\!:\!00  ?  05:00
05\!:\!00  ?  5:00
4\!:\!51\!:\!06 \text{ p.m.}  ?  4:51:06 \text{ p.m.}
9:24  ?  9:24
x=5  ?  5
5  ?  x=5
k=6  ?  k = 6
y = 2x + 3  ?  2x+3
y = 2x + 3  ?  y=3+2x
y = -2x  ?  2x+y=0
t(0,4]  ?  t(0, 4]
1 \pm \sqrt{19}  ?  1+\sqrt{19}, 1-\sqrt{19}
1+\sqrt{19}, 1-\sqrt{19}  ?  1 \pm \sqrt{19}
AB=9, CD=4  ?  CD = 4, AB = 9
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}  ?  \begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}  ?  \begin{bmatrix}1&2\\3&4\end{bmatrix}
\sqrt{12}  ?  2\sqrt{3}
x+1  ?  1+x
(a+5)(b+2)  ?  (b+2)(a+5)
5x - 7y + 11z + 4 = 0  ?  -5x+7y-11z-4=0
\frac{\sqrt{3}}{3}  ?  \frac{\sqrt{3}}{3} \approx 0.577
\$\dfrac23 \approx \$0.67  ?  \frac23
2500,7500  ?  7500, 2500
(2,251,252)  ?  (2, 251, 252)
7p+4e  ?  4e + 7p
\frac{x}{2}  ?  0.5x
E_{1},E_{2}  ?  E_1, E_2
xy  ?  yx
2x + y = 0  ?  y = -2x
4.5e33  ?  4.5\times10^{33}
7p+4e-3  ?  4e-3+7p
2.5x+1  ?  \frac{5}{2}x+1
2\cos 15^{\circ}  ?  2\cos15^\circ
2\cos 15^{\circ}  ?  2 \cos(15^\circ)
x \ge 5  ?  x >= 5
x \leq 2  ?  x<=2
x \neq 3  ?  x != 3
\emptyset  ?  \varnothing
|x|+1  ?  1+\lvert x\rvert
4\pi  ?  4π
x=\pm 2  ?  \pm 2
\pm 2  ?  x=\pm 2
(-\infty,\infty)  ?  \mathbb{R}
x \in \mathbb{R}  ?  (-\infty, \infty)
B  ?  \textbf{(B) }5
\text{(B)}  ?  \textbf{(B)}\ \frac{1}{2}
52_8  ?  52_{\text{eight}}
x > 5  ?  5 < x
125 \text{ miles}  ?  125\textnormal{ miles}
(3, 90^\circ)  ?  (3, 90)
(p,q)=(3,2)  ?  (3,2)
1.85\ \text{USD}  ?  \$1.85
\frac{1}{29,\!322,\!216}  ?  \frac{1}{29322216}
\frac{9 \sqrt{23}}{23}  ?  \frac{9}{\sqrt{23}}
1000  ?  1 000
-4  ?  (-4)
\text{4:30 p.m.}  ?  4:30 \text{ p.m.}
37  ?  37^\circ\text{C}
\begin{pmatrix} x \\ y+1 \end{pmatrix}  ?  \begin{pmatrix} x \\ 1+y \end{pmatrix}
2+\sqrt{3}, 5  ?  5, \sqrt{3}+2
\tan x^\circ  ?  \tan(x^\circ)
x_{1}=5  ?  x_1 = 5
0.0011_{2}  ?  0.0011_2
LQSX  ?  \text{LQSX}
\text{ACF}  ?  A, C, F
\text{(E)},  ?  E
8.24  ?  \approx 8.24 \text{ mph}
5  ?  \text{Area} = 5
\frac{1}{2}  ?  P(A) = \frac{1}{2}
12  ?  12 cm^2
\frac{600}{7}  ?  \frac{600}{7} \text{ km/h}
2x + y = 0  ?  y + 2x = 0
10\pi \text{ cm}  ?  10\pi
\pi \text{ cm}  ?  \pi
(1,-1)  ?  (1, -1.0)
\frac{x}{2}+\frac{1}{3}  ?  \frac13 + \frac x2
3 \sec \frac{1}{2} \theta  ?  3\sec\frac{\theta}{2}
550  ?  550 gallons
49  ?  49 years old
12  ?  12\text{ gallons}
16,3,1,1  ?  w=16, d=3, a=1, b=1
540  ?  \textbf{(540)}
2x+3  ?  2*x + 3
5\pi  ?  5*\pi
\frac{n(n+1)}{2}  ?  \frac{n^2+n}{2}
7:32  ?  7 : 32
S_{MBCN}:S=7:32  ?  7:32
A:B=1  ?  1
2516_8  ?  2516_{8}
12  ?  12\ \mathrm{cm}^2
(3,90)  ?  (3, 90^\circ)
\frac{1}{x}  ?  1/x
\frac{c}{\sqrt2}  ?  \frac{1}{\sqrt{2}}c
40  ?  \(40\)
25\pi  ?  25\pi \text{ square units}
x^2+2x+1  ?  (x+1)^2
(x+1)(x+2)  ?  x^2+3x+2
\frac{3}{2}, -1  ?  x=\frac32 \text{ or } x=-1
(-\infty, -2) \cup (2, \infty)  ?  x \in (-\infty, -2) \cup (2, \infty)
3 + 4i  ?  4i+3
\sqrt[4]{8}  ?  2^{3/4}
a=1, b=2  ?  b=2, a=1
5,-1  ?  \{-1,5\}
\begin{pmatrix}1\\2\end{pmatrix}  ?  \mathbf{v}=\begin{pmatrix}1\\2\end{pmatrix}
\text{Monday}  ?  monday
10\%  ?  10\text{ percent}
60, 120  ?  60^\circ, 120^\circ
45^\circ, 135^\circ  ?  45, 135
5, 6  ?  5\text{ cm}, 6\text{ cm}
20\%, 30\%  ?  20, 30
\frac{1}{2}(\exp{a*t}+\exp{-a*t})  ?  \frac{1}{2}(e^{at} + e^{-at})
12  ?  \boldsymbol{12}
12  ?  \bm{12}
12  ?  {\bf 12}
12  ?  \mathbf{12}
12  ?  \rm 12
12  ?  \color{blue}{12}
12  ?  \textcolor{red}{12}
12  ?  \underline{12}
12  ?  \textstyle 12
12  ?  \[ 12 \]
12  ?  = 12
12  ?  \left. 12 \right.
-3  ?  −3
9.8  ?  9.8 \text{ m} \cdot \text{s}^{-2}
9.8  ?  9.8\ \mathrm{m\,s^{-2}}
12  ?  \$12
12  ?  €12
12  ?  12\text{ euros}
3+4i  ?  3+4 i
2i\sqrt3  ?  2\sqrt3 i
(4,112)  ?  4, 112
18\frac{35}{39}  ?  18 35/39
77  ?  m+n = 77
(3,4]  ?  3 < x \le 4
(-\infty,3)\cup(3,\infty)  ?  x \neq 3
[8,\infty)  ?  x \ge 8
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  ?  \begin{bmatrix} 1 \\ 2 \end{bmatrix}
8\text{ meals}  ?  8\text{ meals}
(5,7)  ?  (x,y)=(5,7)
12  ?  12 \text{ stickers}
12  ?  12\,\mathrm{J/(kg\cdot K)}
(5,\infty)  ?  x > 5
3 < x \le 4  ?  (3,4]
"""

WRONG = r"""
(2,\infty)  ?  x>\sqrt{4}
\frac{x}{3}  ?  0.333333333333333x
(2,\infty)  ?  \frac{x}{2}>1
(-\infty,-3) \cup [0,\infty)  ?  \frac{x}{x + 3} \ge 0
(\sqrt{2},2)  ?  (\sqrt{2},\sqrt{4})
m \frac{d v}{d t}+b v=f  ?  f
B  ?  \textbf{(B) }5, \textbf{(C) }7
B  ?  \textbf{(B) or }C
A  ?  \text{(A)} \text{is wrong}
A  ?  \text{(A)}\&\text{(B)}
C  ?  \text{(C)}=5
C  ?  \text{(C)}+1
x=2  ?  \pm 2
52_8  ?  52_{\text{nine}}
1/3  ?  0.333
1/3  ?  0.333333
1/3  ?  0.3333333333333333
\pi  ?  3.14
\pi  ?  3.14159265358979
\sqrt{2}  ?  1.41421356
\frac{x}{3}  ?  0.333333333x
1000000  ?  1000001
1e-8  ?  2e-8
1e-8  ?  0
3.83e35  ?  3.84e35
3.83e35  ?  3.83e34
3  ?  1, 2, 3, 4
3  ?  3, 4
3  ?  3 or 4
3  ?  x=3 or x=4
4  ?  x=3, x=4
4  ?  a=1, b=4
3  ?  x=3, 4
3  ?  \text{any number}
3  ?  \text{the answer is }3
3  ?  3 \text{ or } 5
3  ?  3 \text{ or more}
3  ?  \text{3 or 4}
3  ?  x < 3
3  ?  x \le 3
3  ?  0 < 3
3  ?  1 = 3
3  ?  1 = 2 = 3
3  ?  2x+z=3
3  ?  x-3=0
3  ?  x^2=9
3  ?  x=1+2
3  ?  1+2
4  ?  2+2
120  ?  5!
12  ?  \sqrt{144}
3  ?  [3,3]
3  ?  (3,3)
3  ?  \{1,2,3\}
3  ?  (-\infty,\infty)
3  ?  x \in (-\infty,\infty)
3  ?  \pm 3
3  ?  -3
(1,2)  ?  [1,2]
(1,2)  ?  (2,1)
(1,2)  ?  [1,2)
(1,2)  ?  \{2,1\}
(3,1)  ?  \{1,3\}
(3,1)  ?  1,3
[1,2]  ?  1,2
[1,2]  ?  \{1,2\}
(5,4)  ?  (3,2)
(-\infty,5)  ?  (-\infty,5]
5\%  ?  0.05
0.05  ?  5\%
5  ?  500\%
5  ?  500
90^\circ  ?  \frac{\pi}{2}
even  ?  neve
even  ?  \text{neve}
\text{even}  ?  e \cdot v \cdot e \cdot n
\text{even}  ?  even odd
\text{even}  ?  odd
\text{Evelyn}  ?  Evelny
\text{Evelyn}  ?  \text{Evelyn, Briana}
\text{(C)}  ?  \text{(D)}
\text{(C)}  ?  A, B, C, D
\text{(C)}  ?  ABCDE
\text{A,C,F}  ?  A,C,E
\text{A,C,F}  ?  F,C
E  ?  e
E  ?  2.718281828
52_8  ?  52_9
52_8  ?  42
10_2  ?  2
6m  ?  6
2k  ?  2
\frac{1}{\sqrt{2}}c  ?  \frac{1}{\sqrt{2}}
x=5  ?  2x+3=13
x=5  ?  x=6
x=5  ?  y=5
AB=9, CD=4  ?  AB=4, CD=9
y = 2x+3  ?  y = 2x+4
5x - 7y + 11z + 4 = 0  ?  0
5x - 7y + 11z + 4 = 0  ?  0=0
5x - 7y + 11z + 4 = 0  ?  x=x
x \in [-2,7]  ?  x \in (-2,7)
1 \pm \sqrt{19}  ?  1 + \sqrt{19}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  ?  \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1/3 \\ 2 \end{pmatrix}  ?  \begin{pmatrix} 0.333333333 \\ 2 \end{pmatrix}
9:24  ?  3:8
1:2  ?  2:4
12:00  ?  1:00
58,500  ?  58,5
58,500  ?  58, 500
10,\!080  ?  10.080
\sqrt{2}  ?  \text{nan}
\sqrt{2}  ?  \frac{0}{0}
\sqrt{2}  ?  \infty - \infty
\sqrt{2}  ?  \frac{1}{0}
\sqrt{2}  ?  \sqrt{2}, 2
\sqrt{2}  ?  \{x : x = \sqrt{2}\}
\sqrt{2}  ?  x^2 = 2
\sqrt{2}  ?  x = \pm\sqrt{2}
\sqrt{2}  ?  x \ge \sqrt{2}
\sqrt{2}  ?  1 \approx \sqrt{2}
\sqrt{2}  ?  [\sqrt{2}, \sqrt{2}]
\sqrt{2}  ?  0=\sqrt{2}
x+1  ?  x+1=x+1
x+1  ?  y
2n  ?  2m
x  ?  y
\alpha  ?  a
f(x)=2x  ?  f(x)=3x
f(x)=x+1, f(x)=-1  ?  f(x)=x+1
3  ?  \frac{3}
3  ?  3\\4
3  ?  \{\}
3  ?  \text{}
3  ?  \,
3  ?  \ldots
3  ?  *
3  ?  3*
3  ?  3 4
34  ?  3 4
34  ?  3\,4
34  ?  3\ 4
1\frac{4}{5}  ?  1 \cdot \frac{4}{5}
-80\leq g(x)\leq 82  ?  [-80,83]
(-\infty,2)\cup(3,\infty)  ?  (-\infty,\infty)
(-\infty,2)\cup(3,\infty)  ?  (-\infty,2)
\{-1\} \cup [0,7)  ?  [0,7)
\text{two lines}  ?  two
\text{October 30}  ?  October 3
3  ?  \lim_{x \to 3} x
3  ?  \sum_{k=1}^{2} k
\sin^2 t  ?  \sin^2
0  ?  \emptyset
2,3  ?  \{2,3,4\}
2,3  ?  2
2,3  ?  3,3
2,3  ?  2,3,2,4
2,3  ?  x=2,y=3,z=4
\frac{1}{2},\sqrt{x}  ?  \frac{1}{2}
\infty  ?  -\infty
\infty  ?  \text{infinitely many}
3  ?  三
3  ?  ３４
3  ?  3;4
3  ?  3|4
3  ?  3 \mid 4
3  ?  3/4
3  ?  \frac{3}{4}
3  ?  3 \vee 4
3  ?  3 \lor 4
\sqrt{3}  ?  \sqrt{3} \lor \sqrt{4}
\sqrt{3}  ?  \sqrt{3} \text{ or } \sqrt{4}
\sqrt{3}  ?  \sqrt{3} \ \sqrt{4}
\sqrt{3}  ?  \sqrt{3} \\ \sqrt{4}
\sqrt{3}  ?  \sqrt{3} \cup \sqrt{4}
\sqrt{3}  ?  \begin{cases} \sqrt{3} \\ \sqrt{4} \end{cases}
x+1  ?  \text{whatever}
3  ?  \sin x = 3
0.11_{2}  ?  0.11_3
0.11_{2}  ?  0.11
2xy  ?  2
x \text{ is even}  ?  x
x+12  ?  x+1 2
3  ?  [3]
300000  ?  310^{5}
CD  ?  DC
\text{H, E}  ?  E, H
MR=SRMC  ?  SRMC
5  ?  x = y = 5
5 \text{ m}  ?  (5 \text{ cm})
0.333  ?  \frac{1}{3} \approx 0.333
x+1  ?  x+1, x+2
7p+4e-3  ?  7p+0.004
x > 5  ?  x < 5
[4,\infty)  ?  x > 4
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  ?  (1, 2)
(1,2,3)  ?  (1,2)
f(x)=2x  ?  g(x)=2x
f(x)=2x  ?  f(x)=2x=3x
f(x)=2x  ?  2x, 3x
2x + y = 0  ?  2x+y=1, 2x+y=0
2x + y = 0  ?  2x+y=0, 2x+y=1
x > 5  ?  x > 5, x > 6
x > 5  ?  x < 9, x > 5
\frac{\sqrt{2}}{10^{20}}  ?  \frac{\sqrt{3}}{10^{20}}
2b  ?  2B
x+B  ?  b+x
\sqrt{2}  ?  \frac{141421356237309504880}{100000000000000000000}
2516_8  ?  2516
3:1  ?  3
3:1  ?  1:3
1:2  ?  \frac12
7:32  ?  14:64
\sqrt2:1  ?  \sqrt2
(5,7)  ?  (2+3,3+4)
(1,-2)  ?  (\sqrt{1},-2)
26\pi  ?  (21+5)\pi
26\pi  ?  2\cdot 13\pi
6-5i  ?  (4-2i)+2-3i
\sqrt{2}  ?  \sin 45^\circ+\cos 45^\circ
-\frac{\pi}{6}  ?  \arcsin(-\frac12)
2340  ?  \mathbf{2007+333}
\sqrt{2}  ?  1.414213562373095048801688724209698078569671875376948073176679737990732478462
\sqrt{2}  ?  1.4142135623730950488
(\sqrt{2},1)  ?  (1.4142135623730950488,1)
\sqrt{2}+x  ?  1.4142135623730950488+x
5  ?  5_8
3,4  ?  3
w=16,d=3  ?  w=3,d=16
14 \pi  ?  14
m_{\max }=n^{2}-n-1  ?  m
5x-3  ?  2x+5+3x-8
\begin{pmatrix} 6 \\ 8\end{pmatrix}  ?  \begin{pmatrix} 1 \\ 2\end{pmatrix}+\begin{pmatrix} 5 \\ 6\end{pmatrix}
720  ?  6!
\{3,4\}  ?  \{3,4,5\}
y=5  ?  x=5
(4,112)  ?  4112
4112  ?  (4,112)
16,3,1,1  ?  16,3
2^{10}  ?  1024.5
\frac{2}{3}  ?  0.6666666666666666666666666666666667
\pi  ?  3.141592653589793238462643383279502884197
\frac{\pi}{3}  ?  1.0471975511965977461542144610931676280657
(-\sqrt{3}, \sqrt{3})  ?  -4<x^{4}+4x^{2}<21
5, 6  ?  5\text{ or } 6\text{ or } 7
5  ?  5\text{ cm}, 6\text{ cm}
\frac{1}{2004!}  ?  10^{-99}
\frac{1}{2^{2007}}  ?  0
\frac{1}{2004!}  ?  \frac{1}{2003!}
\gamma^2-1  ?  \gamma^2-7
-2,-2  ?  -2
1,2,3  ?  1,2,2
618  ?  618\text{ million}
618  ?  618\text{ thousand}
618  ?  618\text{ dozen}
618  ?  618\text{ squared}
618  ?  618\text{ factorial}
618  ?  618\text{ plus one}
618  ?  618\text{ halves}
618  ?  618\text{ at least}
618  ?  618\text{ is wrong}
12  ?  12\text{}^2
458  ?  45%8
150  ?  1°50
20  ?  2\$0
45^\circ, 135^\circ  ?  45135
(0,1)  ?  \[17x\] \[(0,1)\]
17  ?  17 + \fbox{3}
9:24  ?  1:17=9:24
12  ?  \not= 12
12  ?  not=12
12  ?  \text{at least: }12
12  ?  \sqrt{A}=12
17  ?  17 \equiv x
17  ?  17 == x
z  ?  z^2 \in M
N=n  ?  x=x
0.56 = 56\%  ?  0=1
N=n  ?  \{\}
x + 2y  ?  x + 2Y
(1,2)  ?  \{1, 2\}
(1,2)  ?  (x,y)=(2,1)
(8,-2)  ?  (y,x)=(8,-2)
\frac{dM}{dt}=\frac{10^5-M}{0.007}  ?  0.007
\frac{dx}{dt}=kx-a  ?  \frac{dx}{dt}=2(kx-a)
\frac13 E_1 + \frac23 E_2  ?  2/3
\frac \pi4 + 2 - \sqrt2  ?  \frac \pi4 + 2
[2,5)  ?  (2,5)
\{1,2\}  ?  \{1,2,2,3\}
y=2x+3  ?  y=2x+3.00000000000000000000000000000000000000001
\text{odd}  ?  \text{not odd}
12  ?  12\text{ tenths}
12  ?  12\text{ below zero}
12  ?  12\,\mathrm{e}
(-1,1)  ?  |x|<1
(2,5)  ?  2<x\le5
3i+4j  ?  3\mathbf{i}+4\mathbf{k}
"""

# verify_expr_pairs.jsonl, by the number of the row: where the verdict on a box differs from the label, and why
DIFFERENT = r"""
7 13 14 15 16 141  no box and no formula: the value stands in prose
61 142 147 148 156 157 159 163 169 172  no box, or another one: the last formula is not the answer
60  the gold is prose
182 183 190 205 206 223 235 236 237 239 241 242 246 247 248 249 250  several boxes: the last one is the answer
31 32  a line break inside $...$ voids the formula there; in a box it is a space
5 6 17  a decimal comma: a comma separates values or thousands
126 133 139  rounded (option precision): no tolerance
30 123  an expression still to be computed
35 98 100 101 109  a chain of equations: x = value and no more
193 212  a value twice
63 150 151 160 184 185 186  every backslash doubled
196 220  an interval for an inequality in |z| or f(x), not in one letter
202  p=5, q=2 for (5, 2), twice
259  a subscript that is an expression
217  a box that is not closed
253  f(x) for f(y) (option strict=False): names count
263  the label is wrong: 1 - 1/e and 1 + 1/e differ
279 280  185\: the backslash escapes the brace that ends the box
"""

VARIANTS = {
    "as it is": lambda gold: gold,
    "thin space": lambda gold: r"\, " + gold + r"\,.",
    "dollars": lambda gold: f"${gold}$",
    "dfrac": lambda gold: gold.replace(r"\tfrac", r"\dfrac").replace(r"\frac", r"\dfrac"),
    "left": lambda gold: gold.replace("(", r"\left(").replace(")", r"\right)"),
    "no spaces": lambda gold: re.sub(r"(?<![\\a-zA-Z]) +(?![a-zA-Z])|(?<=[(,=+-]) +", "", gold),
}
ASKED = {  # what a problem asks for: the reference
    "x^8-256": "(x^4+16)(x^2+4)(x+2)(x-2)",
    r"\sqrt{32670}": r"33\sqrt{30}",
    r"\sqrt{41+24\sqrt2}": r"3+4\sqrt2",
    r"(x+1)^2 \cdot x": "x^3+2x^2+x",
}
DISGUISES = ("{}", "({})", "0+{}", "{}.", "1\\cdot({})", "\\frac{{{}}}{{1}}", "{{{}}}", "\\boldsymbol{{{}}}")


@pytest.fixture(scope="module")
def verifier():
    return make_verifier(seconds=5.0)  # equal or not is asked here, on a machine that others use, too


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHARED / name).read_text().splitlines()]


def boxed(answers) -> list[str]:
    return [rf"\boxed{{{answer}}}" for answer in answers]


@pytest.mark.parametrize(("table", "score"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_tables(verifier, table, score):
    golds, answers = zip(*(line.split("  ?  ") for line in table.strip().splitlines()), strict=True)
    verdicts = judged(verifier, boxed(answers), golds)
    assert [case for case in zip(golds, answers, verdicts, strict=True) if case[2][0] != score] == []
    assert {verdict for _, verdict in verdicts} <= {"graded", "no_answer"}


def test_every_rule_has_an_example_that_needs_it():
    """The example of a rule of common.py's tables comes out differently when the rule is left out."""
    names = ("SPELLED", "AS_FRACTION", "BARE", "WITHOUT_MARKS", "FOR_PARSER")
    tables = [getattr(common, name).strip().splitlines() for name in names]
    assert 30 < sum(map(len, tables)) <= 40
    for lines in tables:
        for rule in lines:
            example = rule.split(" ┊ ")[2]
            rest = "\n".join(line for line in lines if line != rule)
            assert common.rewrite(rest, example) != common.rewrite("\n".join(lines), example), rule


def test_which_box_and_what_is_none(verifier):
    """The last box is the answer, and one that holds nothing is none, not even where the gold is empty."""
    cases = [
        (r"\boxed{1}, \boxed{2}, \boxed{3}", "1", 0),
        (r"\boxed{1} and \boxed{2}", "1, 2", 0),
        (r"\boxed{a{b}c} and \boxed {\{1,2\}}", r"\{1,2\}", 1),
        (r"\boxed{\boxed{3}}", "3", 1),
        (r"\boxed{3}}", "3", 1),
        (r"\boxed{3", "3", 0),
        (r"\boxed{{3}", "3", 0),
        (r"\boxed{3\}", "3", 0),
        ("boxed{3}", "3", 0),
        ("", "3", 0),
        (r"\boxed{}3{}", "3", 0),
        (r"\boxed{ }", "", 0),
        (r"\boxed{\, }", "", 0),
        (r"\boxed{\text{ }}", "", 0),
        (r"\boxed{$}", "", 0),
        ("\\boxed{\n58,\\!\n500\t}", "58500", 1),
        (r"\boxed{" + "(" * 1900 + "}", "3", 0),
        (r"\boxed{" + "(" * 900 + "3" + ")" * 900 + "}", r"\sqrt{3}", 0),
        (r"\boxed{3" + " " * 3_000_000 + "}", "3", 1),
        (r"\boxed{" + "3," * 3_000_000 + "3}", "3", 0),
        (r"\boxed{3" + r"\text{ or any other number}" * 50 + "}", "3", 0),
        (r"\boxed{3}", "3" + "0" * 5000, 0),
        ("{" * 3_000_000 + r"\boxed{" * 300_000, "3", 0),  # a quadratic search would take hours
    ]
    completions, golds, wanted = zip(*cases, strict=True)
    assert grades(verifier, completions, golds) == list(wanted)


def test_what_a_problem_asks_for_is_not_its_answer(verifier):
    """The hole that a policy finds first. A question that is its own answer stays answerable."""
    cases = [(how.format(asked), ASKED[asked], f"Rewrite ${asked}$.") for asked in ASKED for how in DISGUISES]
    cases.append((r"-(-\sqrt{32670})", r"33\sqrt{30}", r"Simplify $\sqrt{32670}$."))  # a number gives it away
    answers, golds, problems = zip(*cases, strict=True)
    assert not any(grades(verifier, boxed(answers), golds, problems))
    assert all(grades(verifier, boxed(golds), golds, problems))
    assert sum(grades(verifier, boxed(ASKED), ASKED.values())) >= 2, "without the problem's text it cannot be seen"
    own = "Is $2x+4$ the simplest form of $2x+4$? Box it."
    assert grades(verifier, [r"\boxed{2x+4}", r"\boxed{4+2x}"], ["2x+4"] * 2, [own] * 2) == [1.0, 1.0]


PIECES = r"""
    0 1 9. a A % ° ( (( [ { } ) ] , : ; = < ≤ + - ^ _ ~ & ! | \ \{ \} \, \! \\ \[ $ ½ e 1e 1, 1,111 =1,11 (1, {1 cm/ M_
    _{ a_ A, () {} 1+ ~mm^2 x= x_1, }~\text{ \text{ \text{a} \frac \frac{1} \frac12 \sqrt \pm \cup \approx \color{a}
    \mu \alpha \ldots \AA \begin{pmatrix} \left( \right) \boxed{ \circ ~\
""".split()  # noqa: SIM905  one list is easier to read
PIECES += ["m ", "m^2 per ", "the m^2 ", "1~in ^", "in base ", "or ", " and ", "a b ", "1 ab ", "Area ", ", ", " "]
SLOW = [  # a second and more for patterns that give back what they took
    r"5\mu" + r"\alpha" * 9 + "+1",
    r"5 \text{ cm}" + r" \ldots" * 9 + "+1",
    r"\begin{pmatrix}\text{" * 15 + "=(,",
    "1" + "~mm^2\\" * 30,
]


@pytest.mark.parametrize("seed", range(3))
def test_no_pattern_is_slow(seed):
    """An answer has at most 2,000 characters. Each is read and compared within a bound on processor time, whatever is
    repeated in it: one piece after the other, and random runs of pieces between random ends."""
    rng = random.Random(seed)
    texts = [*SLOW]
    for piece in PIECES[seed::3]:
        run = piece * (1900 // len(piece))
        texts += [f"{run}@", f"1{run}", f"({run})", f"\\text{{{run}}}", f"5{run}" + ")" * 90]
    for _ in range(500):
        start, unit, end = ("".join(rng.choices(PIECES, k=rng.randint(*many))) for many in ((0, 2), (2, 3), (0, 2)))
        texts.append(f"{start}{unit * (rng.choice((100, 1900)) // len(unit))}{end}")
    for text in texts:
        started = time.process_time()
        compare(text, r"(1,\sqrt{2})", "What is $3+4x$?")
        assert time.process_time() - started < 0.4, text


@needs_data
@one_in
def test_adversarial_answers(verifier, share):
    """Answers whose truth is sure, made from the benchmarks' references."""
    cases = [row for row in rows("verifier/adversarial.jsonl")[::share] if "rare" not in row["kind"]]
    for right, most in ((False, 0.01), (True, 0.12)):
        these = [row for row in cases if row["right"] == right]
        scores = grades(verifier, boxed(row["answer"] for row in these), [row["gold"] for row in these])
        mistaken = sum(score != right for score in scores)
        assert mistaken <= most * len(these)


@needs_data
@one_in
def test_references_grade_themselves(verifier, share):
    """Also when written a little differently; all but two empty ones, which the loader leaves out and counts."""
    golds = {}
    for path in SHARED.glob("*.jsonl"):
        for number, row in enumerate(rows(path.name)):
            golds[path.stem, number] = reference_answer(row["answer"], "answer")
    empty = [place for place, gold in golds.items() if not gold]
    assert empty == [("math_train_lvl3to5_8523", number) for number in (5054, 5158)]
    sample = [gold for gold in golds.values() if gold][::share]
    for name, variant in VARIANTS.items():
        scores = grades(verifier, boxed(map(variant, sample)), sample)
        assert [gold for gold, score in zip(sample, scores, strict=True) if not score] == [], name


def differing(scores: list, data: list[dict], label: str = "label") -> list[int]:
    """Return the numbers of the rows whose score is not their label."""
    return [number for number, row in enumerate(data) if scores[number] != row[label]]


@needs_data
def test_labels_of_gsm8k(verifier):
    data = rows("verifier/verify_gsm8k_openai.jsonl")
    last_lines = [re.findall(r"^A: *(.*)", row["model_output"], re.MULTILINE)[-1:] for row in data]
    scores = grades(verifier, boxed(map("".join, last_lines)), [row["answer"] for row in data])
    assert differing(scores, data) == [] and len(data) == 5276


@needs_data
def test_labels_of_qwen(verifier):
    """One of 724 differs: Qwen's grader takes 10000 to differ from the gold 10{,}000; math_verify and ours do not."""
    data = rows("verifier/verify_qwen_math_cot100.jsonl")
    scores = grades(verifier, [row["model_output"] for row in data], [row["answer"] for row in data])
    assert differing(scores, data) == [524]
    assert differing(scores, data, "math_verify_label") == []


@needs_data
def test_labels_of_expression_pairs(verifier):
    """Pairs of math_verify's and NeMo-Skills' own tests: what stands in the last box or formula, put into a box."""

    def answer(text: str) -> str:
        formulas = re.findall(r"\$\$.+?\$\$|(?<!\\)\$.+?(?<!\\)\$|\\\[.+?\\\]|\\\(.+?\\\)", text, re.DOTALL)
        last = formulas[-1] if formulas and not re.fullmatch(r"\$.*\$", text) else text
        inside = re.fullmatch(r"\$?\$([^$]*)\$\$?|\\\[(.*)\\\]|\\\((.*)\\\)", last, re.DOTALL)
        return last_boxed(text) or (inside and (inside[1] or inside[2] or inside[3])) or last

    data = rows("verifier/verify_expr_pairs.jsonl")
    golds = [last_boxed(row["answer"]) or row["answer"] for row in data]
    scores = grades(verifier, boxed(answer(row["model_output"]) for row in data), golds)
    expected = [int(number) for line in DIFFERENT.strip().splitlines() for number in line.split("  ")[0].split()]
    assert differing(scores, data) == sorted(expected)
